"""Errors of a prediction, and the terms of a loss that are built from them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dit.layout import SequenceLayout

LossKind = Literal["l2", "l1", "huber"]
TokenLossKind = Literal["l2", "l1", "huber", "l2_cosine"]


@dataclass(frozen=True)
class Term:
    """One summand of a loss: an error per token, and a weight per noise level; float32.

    Attributes:
        error_T: error of each local token, the mean over its channels; 0 in padding and in clean tokens.
        weight_L: weight of each noise level; a sample has one, unless its layout has `levels`.
    """

    error_T: Tensor
    weight_L: Tensor

    def sum(self, layout: SequenceLayout) -> Tensor:
        """Return the weighted sum over the local tokens."""
        return (self.error_T * layout.level_layout.per_token(self.weight_L)[:, 0]).sum()

    def sum_per_level(self, layout: SequenceLayout) -> Tensor:
        """Return the weighted sum over the local tokens of each noise level `[L]`."""
        return layout.level_layout.sum_per_sample(self.error_T) * self.weight_L


@dataclass(kw_only=True)
class UncertaintyWeighting:
    """Weight noise levels by a learned u(sigma): loss = error / e**u + u.

    At the minimum, e**u is the mean error at a noise level, so all levels weigh the same in the gradient. The network
    has a head for u (`dit.layers.uncertainty`). `loss_raw` logs the unweighted error.

    Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, Eq. 21.
    """

    terms: ClassVar[tuple[str, ...]] = ("scaled", "uncertainty")
    logged: ClassVar[tuple[str, ...]] = (*terms, "raw")

    def loss_terms(
        self, prediction_TC: Tensor, target_TC: Tensor, weight_L: Tensor, layout: SequenceLayout, kind: TokenLossKind
    ) -> dict[str, Term]:
        """Scale the errors by e**-u, and add u, the last column of the prediction, for every noised token."""
        error_T = token_error(prediction_TC[:, :-1], target_TC, layout, kind)
        u_T = torch.where(layout.noised_T, prediction_TC[:, -1].float(), 0.0)
        return {
            "scaled": Term(error_T * torch.exp(-u_T), weight_L),
            "uncertainty": Term(u_T, weight_L),
            "raw": Term(error_T.detach(), weight_L),
        }


SMALLEST_NORM = 0.01
"""Limits the gradient of a cosine. A new network predicts zeros, where torch's default of 1e-8 gives gradients of 1e8,
which remain in the second moments of Adam for hundreds of steps."""


def pointwise_error(prediction: Tensor, target: Tensor, kind: LossKind) -> Tensor:
    """Return the elementwise error in float32; `huber` is the smooth l1 error with threshold 1."""
    difference = prediction.float() - target.float()
    if kind == "l2":
        return difference.square()
    if kind == "l1":
        return difference.abs()
    return torch.nn.functional.huber_loss(prediction.float(), target.float(), reduction="none")


def token_error(prediction_TC: Tensor, target_TC: Tensor, layout: SequenceLayout, kind: TokenLossKind) -> Tensor:
    """Return the error of each local token, the mean over its channels, float32; 0 in padding and clean tokens.

    `l2_cosine` adds 1 minus the cosine of prediction and target over the channels of a token (Yao and Wang 2025,
    arXiv:2501.01423, section 4). Deviation: prediction norms below `SMALLEST_NORM` are replaced by it.
    """
    noised_T1 = layout.noised_T[:, None]
    # Mask before the error, not after: otherwise a NaN in padding would return as 0 * NaN in the gradient.
    prediction_TC, target_TC = (torch.where(noised_T1, x_TC.float(), 0.0) for x_TC in (prediction_TC, target_TC))
    if kind != "l2_cosine":
        return pointwise_error(prediction_TC, target_TC, kind).mean(-1)
    cosine_T = torch.nn.functional.cosine_similarity(prediction_TC, target_TC, dim=-1, eps=SMALLEST_NORM)
    return pointwise_error(prediction_TC, target_TC, "l2").mean(-1) + layout.noised_T * (1 - cosine_T)


def min_snr_weight(alpha: Tensor, sigma: Tensor, slope: Tensor, gamma: float) -> Tensor:
    """Return the weight that turns the squared error of an output into that of x0, weighted by min(SNR, gamma).

    SNR is (alpha / sigma)**2 with the coefficients of the path, and `slope` d x0 / d output. gamma is 5 in the paper.

    Source: Hang et al. 2023, arXiv:2303.09556, section 3.4.
    """
    return (alpha / sigma).square().clamp(max=gamma) * slope.square()
