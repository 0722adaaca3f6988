"""Representation alignment: hidden states of the network predict features of a frozen teacher."""

from dataclasses import dataclass, replace
from typing import Optional

import torch
from torch import Tensor

from dit.auxiliary import Projection
from dit.condition_table import TEACHER
from dit.conditions import Condition
from dit.layout import SequenceLayout
from dit.objectives.losses import Term
from dit.ranges import COUNT_OR_NONE, LAYERS, POSITIVE, WIDTH, check_ranges


@dataclass(kw_only=True)
class Alignment:
    """Add -weight * cos(y, h(x)) to the loss of each noised token.

    y is the teacher's feature of the clean patch, x the token after `layer` layers, h a projection of three linear
    layers. Tokens weigh as in the error of the prediction: all the same, times the loss weight of their sample, but not
    times the weight of their noise level. The held-out loss does not include this term.

    Args:
        weight: weight of the term.
        layer: number of layers before the projection.
        features: width of the teacher's features.
        hidden_size: inner width of the projection.
        until_step: completed steps after which the term no longer counts; None for no end.

    Source: Yu et al. 2024 (REPA), arXiv:2410.06940, Eq. 8; `until_step`: Wang et al. 2025 (HASTE), arXiv:2505.16792.
    """

    weight: float = 0.5
    layer: int = 8
    features: int = 768
    hidden_size: int = 2048
    until_step: Optional[int] = None

    def __post_init__(self) -> None:
        ranges = {"weight": POSITIVE, "layer": LAYERS, "features": WIDTH, "hidden_size": WIDTH}
        check_ranges("objective.alignment", self, {**ranges, "until_step": COUNT_OR_NONE})

    @property
    def condition(self) -> Condition:
        """The features that samples store."""
        return replace(TEACHER, shape=(self.features,))

    @property
    def projection(self) -> Projection:
        """Sizes of the projection."""
        return Projection(self.layer, self.hidden_size, self.features, self.until_step)

    def weight_L(self, sample_weight_L: Tensor, step_1: Tensor) -> Tensor:
        """Return the weight of each noise level's term after the number of completed steps, int64 `[1]`."""
        weight_L = self.weight * sample_weight_L
        return weight_L if self.until_step is None else weight_L * (step_1 < self.until_step)

    def term(self, columns_TC: Tensor, weight_L: Tensor, layout: SequenceLayout) -> Term:
        """Return the term from -cos of each local token, a column; there is none in held-out passes."""
        return Term(torch.where(layout.noised_T, columns_TC.float().sum(1), 0.0), weight_L)
