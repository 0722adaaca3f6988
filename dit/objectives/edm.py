"""EDM: a preconditioner scales input and target of the network to unit variance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.augmentation import with_noised_pictures
from dit.objectives.base import Network, Objective, Path, Prepared, clean_at_0, sample_weights, shared_level
from dit.objectives.losses import LossKind, UncertaintyWeighting
from dit.objectives.noise_levels import log_normal
from dit.ranges import FINITE, POSITIVE, ranged


class VarianceExplodingPath(Path):
    """x_u = x0 + u eps; the position on the path is sigma."""

    def alpha_sigma(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(u), u

    def derivatives(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(u), torch.ones_like(u)


@dataclass(kw_only=True)
class EDM(Objective):
    """EDM training objective, one noise level per packed sample, or several (`dit.levels`).

    The loss compares outputs of the network, where lambda(sigma) * c_out**2 == 1 and every noise level weighs the same.

    Clean tokens have sigma = 0, where c_in is finite, and D(x; 0) = x. The network's time log(sigma) / 4 is not, so
    they have the time of `sigma_min`, the lowest level at which a solver calls the network.

    Args:
        sigma_data: standard deviation of clean latents.
        p_mean, p_std: mean and standard deviation of log sigma in training.
        augmentation_p_mean: `p_mean` of low-resolution pictures; None for the same.
        sigma_min, sigma_max: last (before 0) and first noise level of the sampling grid.
        rho: exponent of the sampling grid; larger: more steps at low noise.
        weighting: learned weights of the noise levels (`uncertainty`).

    Source: Karras et al. 2022, arXiv:2206.00364, Table 1 and Eq. 5, 7 and 8.
    """

    takes_levels: ClassVar[bool] = True
    augments: ClassVar[bool] = True

    sigma_data: float = ranged(0.5, POSITIVE)
    p_mean: float = ranged(-1.2, FINITE)
    p_std: float = ranged(1.2, POSITIVE)
    augmentation_p_mean: Optional[float] = ranged(None, FINITE)
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = ranged(7.0, POSITIVE)
    loss_kind: LossKind = "l2"
    weighting: Optional[UncertaintyWeighting] = None

    def __post_init__(self) -> None:
        self.path = VarianceExplodingPath()
        super().__post_init__()
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise ConfigError(
                f"EDM needs 0 < sigma_min < sigma_max, got sigma_min={self.sigma_min} and sigma_max={self.sigma_max}; "
                "the paper's are 0.002 and 80"
            )

    def augment(
        self, batch: PackedBatch, required: Sequence[Condition], noise: AddressedNoise, *, draw: bool
    ) -> PackedBatch:
        """Add noise of a level sigma' of each sample; noised pictures are scaled by c_in(sigma')."""
        mean = self.p_mean if self.augmentation_p_mean is None else self.augmentation_p_mean
        level = partial(log_normal, mean=mean, std=self.p_std) if draw else None
        return with_noised_pictures(batch, required, noise, level, lambda sigma: self.scalings(sigma)[2])

    def level(self, quantile_S: Tensor) -> Tensor:
        """Return sigma at each quantile."""
        return log_normal(quantile_S, self.p_mean, self.p_std)

    def scalings(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return c_skip, c_out and c_in at `sigma`."""
        total = sigma.square() + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data / total.sqrt(), total.rsqrt()

    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Return inputs c_in x with x = x0 + sigma eps, times, targets (x0 - c_skip x) / c_out, and loss weights."""
        sigma_L = clean_at_0(self.level(noise.level_L()), batch.layout)
        _, c_out, c_in = self.scalings(sigma_L)
        # In (x0 - c_skip x) / c_out, x0 has the coefficient (1 - c_skip) / c_out = c_out / sigma_data**2, and eps has
        # -c_skip sigma / c_out = -sigma_data c_in. The right-hand sides do not subtract nearly equal numbers.
        target = (c_out / self.sigma_data**2, -self.sigma_data * c_in)
        inputs_TC, target_TC = noise.mix(batch.latents_TC, (c_in, c_in * sigma_L), target)
        return Prepared(
            inputs_TC=inputs_TC,
            time_S=self._network_time(sigma_L),
            target_TC=target_TC,
            weight_S=sample_weights(batch),
        )

    def _network_time(self, sigma: Tensor) -> Tensor:
        """Return the network's input for `sigma`; 0 has that of `sigma_min`."""
        return torch.where(sigma == 0, self.sigma_min, sigma).log() / 4

    def denoise(self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout) -> Tensor:
        """Return D(x; sigma) = c_skip x + c_out F(c_in x, log(sigma) / 4) with sigma = `u`."""
        sigma_L = shared_level(u, layout)
        c_skip, c_out, c_in = (layout.level_layout.per_token(c_L).to(x_TC.dtype) for c_L in self.scalings(sigma_L))
        output_TC = network((c_in * x_TC).float(), self._network_time(sigma_L).float())
        return c_skip * x_TC + c_out * output_TC.to(x_TC.dtype)

    def sampling_grid(self, num_steps: int) -> Tensor:
        """Return sigma_max ... sigma_min, evenly spaced in sigma**(1 / rho), then 0."""
        ramp = torch.linspace(0, 1, num_steps, dtype=torch.float64)
        first, last = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        sigmas = (first + ramp * (last - first)) ** self.rho
        return torch.cat([sigmas, torch.zeros(1, dtype=torch.float64)])
