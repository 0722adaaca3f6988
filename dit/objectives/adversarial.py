"""The adversarial loss of autoencoders: one backward pass trains the autoencoder and a discriminator of patches."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dit.auxiliary import PatchGAN
from dit.layout import SequenceLayout
from dit.objectives.base import Prepared
from dit.objectives.losses import LossKind, Term, token_error
from dit.ranges import COUNT_OR_ZERO, POSITIVE, check_ranges, ranged

NUM_SCORES = 3
"""Columns of a prediction that the discriminator adds (`dit.models.autoencoder.discriminator`)."""
MAX_ADAPTIVE_WEIGHT = 1e4
TINY = 1e-6  # delta of Eq. 7


@dataclass(frozen=True, kw_only=True)
class Adversarial(PatchGAN):
    """Train the autoencoder against a discriminator D that scores patches of pictures ("VQGAN loss").

    With a sample x, its reconstruction y, the mean over patches in D(.), and sg for a stopped gradient, both networks
    minimise, from step `start_step` on,

        loss + weight * lambda * -D'(y) + 1/2 mean max(0, 1 - D(x)) + 1/2 mean max(0, 1 + D(sg(y)))
        lambda = |d error / d y| / (|d D'(y) / d y| + 1e-6), at most 1e4, without a gradient

    where D' is D with constant parameters and `error` is the mean error of the sample's pixel values. One optimizer and
    one backward pass train both networks; Adam's betas and the norm for clipping are common. The
    held-out loss is that of step 0, without these terms unless `start_step` is 0.

    Before `start_step`, D is computed without effect, and Adam already counts steps, so that the first updates of D are
    larger than in a new run. It is faster to train without D first, and to add it in a new run with
    `checkpoint.start_from` and `start_step=0`.

    Args:
        weight: weight of the autoencoder's term.
        start_step: completed steps before the adversarial terms count.
        num_layers, hidden_size: convolutions of D that halve the sides (at least 3 * 2**num_layers pixels), and
            channels of the first one.
        lr_factor: learning rate of D, relative to `optimizer.lr`.

    Source: Esser et al. 2021, arXiv:2012.09841, section 3.1 and Eq. 7; hinge terms: Lim and Ye 2017, arXiv:1705.02894;
    D: Isola et al. 2017, arXiv:1611.07004. Deviations: lambda is of each sample and with respect to y, not of the batch
    and with respect to the last layer, so that it does not depend on micro-batches and ranks; D has group norms instead
    of batch norms for the same reason; the error is of pixels, without a perceptual term.
    """

    weight: float = ranged(0.5, POSITIVE)
    start_step: int = ranged(50_000, COUNT_OR_ZERO)
    lr_factor: float = ranged(1.0, POSITIVE)

    terms: ClassVar[tuple[str, ...]] = ("generator", "discriminator")
    logged: ClassVar[tuple[str, ...]] = ("adaptive_weight",)

    def __post_init__(self) -> None:
        check_ranges("objective.adversarial", self)

    def weight_S(self, sample_weight_S: Tensor, step_1: Tensor) -> Tensor:
        """Return the weight of each sample's terms after the number of completed steps, int64 `[1]`."""
        return sample_weight_S * (step_1 >= self.start_step)

    def loss_terms(
        self, scores_TC: Tensor, reconstruction_TC: Tensor, prepared: Prepared, layout: SequenceLayout, kind: LossKind
    ) -> dict[str, Term]:
        """Weigh the terms of the discriminator: -D'(y), the hinge terms, and |d D'(y) / d y| of each token's sample."""
        weight_S = prepared.adversarial_weight_S
        assert weight_S is not None
        # Every token has the values of its sample, so that a sample counts as often as in the mean error of tokens.
        generator_T, hinge_T, slope_T = torch.where(layout.valid_T[:, None], scores_TC, 0.0).unbind(1)
        slope_S = layout.sum_per_sample(slope_T.detach()) / layout.lengths_S
        error_slope_S = error_slope(reconstruction_TC, prepared.target_TC, layout, kind)
        adaptive_S = (error_slope_S / (slope_S + TINY)).clamp(max=MAX_ADAPTIVE_WEIGHT)
        return {
            "generator": Term(generator_T, weight_S * self.weight * adaptive_S),
            "discriminator": Term(hinge_T, weight_S),
            "adaptive_weight": Term(layout.valid_T.float(), adaptive_S),
        }


@torch.enable_grad()
def error_slope(reconstruction_TC: Tensor, target_TC: Tensor, layout: SequenceLayout, kind: LossKind) -> Tensor:
    """Return the norm of the gradient of each sample's mean error by its reconstruction, float32 `[S]`."""
    y_TC = reconstruction_TC.detach().requires_grad_()
    mean_S = layout.sum_per_sample(token_error(y_TC, target_TC, layout, kind)) / layout.lengths_S
    (slope_TC,) = torch.autograd.grad(mean_S.sum(), y_TC)
    return layout.sum_per_sample(slope_TC.square().sum(1)).sqrt().detach()
