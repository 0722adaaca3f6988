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
    """A corrupted micro-batch with the outputs to avoid.

    Attributes:
        negative_TC: output for the velocity of another sample; None for a pack of one sample.
    """

    negative_TC: Optional[Tensor]


@dataclass(kw_only=True)
class ContrastiveFlowMatching(FlowMatching):
    """Flow matching with the loss |v - (eps - x0)|^2 - contrast_weight |v - (eps' - x0')|^2.

    x0' is another sample, and eps' is noise of its own. Samples 2k and 2k + 1 of a pack are negatives of each other;
    the last of an odd number has the one before, and the only sample of a pack has none and only the first term. Pairs
    depend neither on ranks nor on the size of micro-batches, because packs do not, and a micro-batch without packing
    must have an even number of samples. A negative of another size is resized by nearest neighbours. The held-out loss
    has no negatives.

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
        """Add the outputs to avoid: eps' - x0' or, for `prediction=x0`, the x0 of this velocity, x - t (eps' - x0')."""
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
        error_T = token_error(prediction_TC, prepared.negative_TC, layout, self.loss_kind)
        return {**terms, "contrast": Term(error_T, -self.contrast_weight * prepared.weight_S)}


def num_samples(grids: Sequence[Grid]) -> int:
    """Return the number of samples without the empty ones, with which `dit.fixed_packs` fills a pack."""
    return sum(map(any, grids))


def negative_of(sample: int, num_samples: int) -> int:
    """Return the number of the sample that is the negative of a sample of a pack."""
    other = sample ^ 1
    return other if other < num_samples else sample - 1


def negative_tokens(layout: SequenceLayout, grids: Sequence[Grid]) -> Tensor:
    """Return for each token of a full pack a token of its sample's negative, int64 `[T]` on the host.

    Token i of n along an axis has token i * n' // n of the negative, so equal sizes have equal positions. Padding and
    references, which have no loss, have their own token.

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
