"""A head that learns how hard each noise level is, to weigh the loss by it."""

import math

import torch
from torch import Tensor, nn

from dit.backends.init import ZEROS
from dit.backends.provider import LayerProvider

# Golden-ratio steps spread phases evenly over the circle, however many there are.
_PHASE_STEP = (math.sqrt(5) - 1) / 2


def fourier_features(time_S: Tensor, count: int) -> Tensor:
    """Return sqrt(2) cos(2 pi (f t + phase)) of `count` frequencies f, float32 `[S, count]`.

    The frequencies are the quantiles of a standard normal distribution in place of draws from it, so they are no state.
    The angles are float64 inside, for the rows are few.

    Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, Eq. 75.
    """
    i = torch.arange(count, device=time_S.device, dtype=torch.float64)
    frequency, phase = torch.special.ndtri((i + 0.5) / count), i * _PHASE_STEP
    return (math.sqrt(2) * torch.cos(2 * math.pi * (time_S.double()[:, None] * frequency + phase))).float()


class Uncertainty(nn.Module):
    """u(sigma), the log of the loss to be expected at a noise level: Fourier features of the time, then a linear layer.

    It starts at 0, where the weighted loss is the plain one. Every tensor-parallel rank has it and sees all tokens.

    Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, Eq. 21 (the authors' published code gives the number), after
    Kendall et al. 2018, arXiv:1705.07115. Deviations: fixed frequencies and phases; the weights start at 0 and are not
    normalised.
    """

    def __init__(self, provider: LayerProvider, *, features: int = 128) -> None:
        super().__init__()
        self.weight = provider.parameter((features,), ZEROS, gradient_covers="all_tokens")

    def forward(self, time_S: Tensor) -> Tensor:
        """Return u of each sample, float32 `[S]`."""
        return fourier_features(time_S, len(self.weight)) @ self.weight.float()
