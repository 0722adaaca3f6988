"""Representation alignment: hidden states of the network predict features of a frozen teacher."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dit.auxiliary import Projection
from dit.layout import SequenceLayout
from dit.objectives.losses import Term
from dit.ranges import POSITIVE, check_ranges, ranged


@dataclass(frozen=True, kw_only=True)
class Alignment(Projection):
    """Add -weight * cos(y, h(x)) to the loss of each noised token.

    y is the teacher's feature of the clean patch, x the token after `layer` layers, h a projection of three linear
    layers. Tokens weigh as in the error of the prediction: all the same, times the loss weight of their sample, but not
    times the weight of their noise level. With `model.teacher_token_size`, the class token of a sample is one of its
    tokens: a sample of n patches has n times the mean over n + 1 tokens. The held-out loss does not include this term.

    Args:
        weight: weight of the term.

    Source: Yu et al. 2024 (REPA), arXiv:2410.06940, Eq. 8; `until_step`: Wang et al. 2025 (HASTE), arXiv:2505.16792;
    class token: Wu et al. 2025 (REG), arXiv:2507.01467, and the code of SR-DiT (Bhanded 2025, arXiv:2512.12386).
    """

    weight: float = ranged(0.5, POSITIVE)

    def __post_init__(self) -> None:
        check_ranges("objective.alignment", self)

    def weight_L(self, sample_weight_L: Tensor, step_1: Tensor) -> Tensor:
        """Return the weight of each noise level's term after the number of completed steps, int64 `[1]`."""
        weight_L = self.weight * sample_weight_L
        return weight_L if self.until_step is None else weight_L * (step_1 < self.until_step)

    def term(self, columns_TC: Tensor, weight_L: Tensor, layout: SequenceLayout) -> Term:
        """Return the term from -cos of each local token, and of the class token of its sample if there is one.

        There are no columns in held-out passes.
        """
        columns_TC = columns_TC.float()
        if columns_TC.shape[1] == 2:
            n_T1, patch_T1, token_T1 = layout.per_token(layout.lengths_S), columns_TC[:, :1], columns_TC[:, 1:]
            columns_TC = (n_T1 * patch_T1 + token_T1) / (n_T1 + 1)
        return Term(torch.where(layout.noised_T, columns_TC.sum(1), 0.0), weight_L)
