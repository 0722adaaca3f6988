"""Contrastive flow matching: a velocity is also pushed away from that of another sample."""

import zlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.layout import SequenceLayout, to_device
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Prepared
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.losses import Term, token_error
from dit.patchify import Grid
from dit.ranges import SHARE_BELOW_1, check_ranges


@dataclass(frozen=True)
class PreparedContrast(Prepared):
    """A noised micro-batch with negative targets.

    Attributes:
        negative_TC: target from another sample, in the parametrisation of the output; None for a pack of one sample.
    """

    negative_TC: Optional[Tensor]


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

    contrast_weight: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges("objective", self, {"contrast_weight": SHARE_BELOW_1})

    @property
    def terms(self) -> tuple[str, ...]:
        return (*super().terms, "contrast")

    def of_full_pack(self, batch: PackedBatch) -> PackedBatch:
        if num_samples(batch.grids) == 1:
            return batch
        indices_T = to_device(negative_tokens(batch.layout, batch.grids), batch.latents_TC.device)
        return replace(batch, negatives_TC=batch.latents_TC[indices_T])

    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> PreparedContrast:
        """Add the negative target: v' = eps' - x0' or, for `prediction=x0`, its x0 at the noised input, x_t - t v'."""
        prepared, negative_TC = super().prepare(batch, noise), None
        if batch.negatives_TC is not None:
            other = copy(noise)
            other.seed = noise.seed ^ zlib.crc32(b"negative") << 32
            (negative_TC,) = other.mix(batch.negatives_TC, (-1.0, 1.0))
            if self.prediction == "x0":
                t_T1 = batch.layout.level_layout.per_token(prepared.time_S)
                negative_TC = prepared.inputs_TC - t_T1 * negative_TC
        return PreparedContrast(**vars(prepared), negative_TC=negative_TC)

    def loss_terms(self, prediction_TC: Tensor, prepared: Prepared, layout: SequenceLayout) -> dict[str, Term]:
        assert isinstance(prepared, PreparedContrast)
        terms = super().loss_terms(prediction_TC, prepared, layout)
        if prepared.negative_TC is None:
            return {**terms, "contrast": Term(torch.zeros_like(terms["error"].error_T), prepared.weight_S)}
        output_TC = prediction_TC[:, : prepared.negative_TC.shape[1]]
        error_T = token_error(output_TC, prepared.negative_TC, layout, self.loss_kind)
        return {**terms, "contrast": Term(error_T, -self.contrast_weight * prepared.weight_S)}


def num_samples(grids: Sequence[Grid]) -> int:
    """Return the number of samples without the empty ones, with which `dit.fixed_packs` fills a pack."""
    return sum(map(any, grids))


def negative_of(sample: int, num_samples: int) -> int:
    """Return the index of a sample's negative; the pack has at least two samples."""
    other = sample ^ 1
    return other if other < num_samples else sample - 1


def negative_tokens(layout: SequenceLayout, grids: Sequence[Grid]) -> Tensor:
    """Return the index of a token of the negative for each token of a global pack, int64 `[T]` on the host.

    Along an axis with n tokens, and n' tokens in the negative, token i is compared with token i * n' // n. Padding and
    the tokens of reference pictures have no loss, so they keep their own index.

    Args:
        grids: (t, h, w) of each sample.
    """
    indices_T = torch.arange(layout.total_tokens)
    for sample in range(count := num_samples(grids)):
        start, grid, other = layout.starts[sample], grids[sample], negative_of(sample, count)
        t, h, w = (torch.arange(n) * m // n for n, m in zip(grid, grids[other]))
        _, height, width = grids[other]
        tokens = (t[:, None, None] * height + h[:, None]) * width + w
        indices_T[start : start + tokens.numel()] = layout.starts[other] + tokens.flatten()
    return indices_T
