"""A head that learns the expected loss at each noise level, as a weight of the loss."""

import math

import torch
from torch import Tensor, nn

from dit.backends.init import ZEROS
from dit.backends.provider import LayerProvider

# Golden-ratio steps spread any number of phases evenly over the circle.
_PHASE_STEP = (math.sqrt(5) - 1) / 2


def fourier_features(time_S: Tensor, count: int) -> Tensor:
    """Return sqrt(2) cos(2 pi (f t + phase)) of `count` frequencies f, float32 `[S, count]`.

    The frequencies are quantiles of a standard normal distribution instead of random draws, so they need not be saved.
    Angles are float64, which is cheap because there are few samples.

    Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, Eq. 75.
    """
    i = torch.arange(count, device=time_S.device, dtype=torch.float64)
    frequency, phase = torch.special.ndtri((i + 0.5) / count), i * _PHASE_STEP
    return (math.sqrt(2) * torch.cos(2 * math.pi * (time_S.double()[:, None] * frequency + phase))).float()


class Uncertainty(nn.Module):
    """u(sigma), the log of the expected loss at a noise level: Fourier features of the time, then a linear layer.

    It is initialised to u = 0, where the weighted loss equals the unweighted loss. Tensor-parallel ranks have replicas,
    and each uses all tokens.

    Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, Eq. 21 (number of features from the authors' published code),
    after Kendall et al. 2018, arXiv:1705.07115. Deviations: fixed frequencies and phases; weights are initialised to
    zero and not normalised.
    """

    def __init__(self, provider: LayerProvider, *, features: int = 128) -> None:
        super().__init__()
        self.weight = provider.parameter((features,), ZEROS, gradient_covers="all_tokens")

    def forward(self, time_S: Tensor) -> Tensor:
        """Return u of each sample, float32 `[S]`."""
        return fourier_features(time_S, len(self.weight)) @ self.weight.float()
