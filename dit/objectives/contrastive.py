"""Contrastive flow matching: a velocity is also pushed away from that of another sample."""

import zlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Entry
from dit.layout import SequenceLayout, to_device
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Prepared
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.losses import Term, token_error
from dit.patchify import Grid
from dit.ranges import SHARE_BELOW_1, ranged

NEGATIVE = "negative"
"""Name of an entry in the conditions of a batch: for each token, a clean one of another sample."""


@dataclass(kw_only=True)
class ContrastiveFlowMatching(FlowMatching):
    """Flow matching with the loss |v - (eps - x0)|^2 - contrast_weight |v - (eps' - x0')|^2.

    x0' is another sample, and eps' is separate noise. Samples 2k and 2k + 1 of a pack are each other's negatives; the
    last one of an odd number uses the sample before it. A pack with one sample has no contrastive term. The parallel
    layout changes no pairs. Without packing, `training.micro_batch_size` must be even, so that it changes none either.
    A negative of another size is resized by nearest neighbours. The held-out loss has no negatives.

    Args:
        contrast_weight: weight of the second term.

    Source: Stoica et al. 2025, arXiv:2506.05350, weight 0.05. Deviation: the negative may have the same class.
    """

    compares_pairs: ClassVar[bool] = True

    contrast_weight: float = ranged(0.05, SHARE_BELOW_1)

    @property
    def terms(self) -> tuple[str, ...]:
        return (*super().terms, "contrast")

    def of_full_pack(self, batch: PackedBatch) -> PackedBatch:
        grids = [grid for grid in batch.grids if any(grid)]  # `dit.fixed_packs` fills a pack with empty samples
        # A pack without a pair has the entry, too, but no term: all packs of a CUDA graph need the same entries.
        has_pair = len(grids) > 1
        indices_T = negative_tokens(batch.layout, grids) if has_pair else torch.arange(batch.layout.total_tokens)
        indices_T = to_device(indices_T, batch.latents_TC.device)
        negative = Entry("latent", batch.latents_TC[indices_T])
        return replace(batch, conditions=batch.conditions | {NEGATIVE: negative})

    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Add the negative target: v' = eps' - x0' or, for `prediction=x0`, its x0 at the noised input, x_t - t v'."""
        prepared = super().prepare(batch, noise)
        if NEGATIVE not in batch.conditions:
            return prepared
        other = copy(noise)
        other.seed = noise.seed ^ zlib.crc32(b"negative") << 32
        (negative_TC,) = other.mix(batch.conditions[NEGATIVE].values, (-1.0, 1.0))
        if self.prediction == "x0":
            t_T1 = batch.layout.level_layout.per_token(prepared.time_S)
            negative_TC = prepared.inputs_TC - t_T1 * negative_TC
        return replace(prepared, negative_TC=negative_TC)

    def loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        terms = super().loss_terms(prediction_TC, prepared, layout)
        if prepared.negative_TC is None:
            return {**terms, "contrast": Term(torch.zeros_like(terms["error"].error_T), prepared.weight_S)}
        output_TC = prediction_TC[:, : prepared.negative_TC.shape[1]]
        error_T = token_error(output_TC, prepared.negative_TC, layout, self.loss_kind)
        has_pair = (layout.lengths_S > 0).sum() > 1
        return {**terms, "contrast": Term(error_T, -self.contrast_weight * prepared.weight_S * has_pair)}


def negative_tokens(layout: SequenceLayout, grids: Sequence[Grid]) -> Tensor:
    """Return the index of a token of the negative for each token of a global pack of at least two samples, int64 `[T]`.

    Along an axis with n tokens, and n' tokens in the negative, token i is compared with token i * n' // n. Padding and
    the tokens of reference pictures have no loss, so they keep their own index.
    """
    indices_T = torch.arange(layout.total_tokens)
    for sample, grid in enumerate(grids):
        start, neighbour = layout.starts[sample], sample ^ 1
        other = neighbour if neighbour < len(grids) else sample - 1
        t, h, w = (torch.arange(n) * m // n for n, m in zip(grid, grids[other]))
        _, height, width = grids[other]
        tokens = (t[:, None, None] * height + h[:, None]) * width + w
        indices_T[start : start + tokens.numel()] = layout.starts[other] + tokens.flatten()
    return indices_T
