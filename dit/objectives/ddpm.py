"""DDPM: variance-preserving diffusion in continuous time or on a classic table of steps."""

import math
from dataclasses import dataclass
from typing import Literal, Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import (
    LossKind,
    Network,
    Objective,
    Path,
    Prepared,
    sample_weights,
    shared_time,
)
from dit.objectives.noise_levels import ScheduleName, make_schedule
from dit.ranges import check_choice, check_ranges, whole

Prediction = Literal["noise", "x0", "v"]

# A noise prediction is divided by alpha to get x0. Sampling from it starts here, just below where the linear schedule
# ends anyway (0.0064); a cosine schedule goes on to 0 and would multiply the network's error without bound.
MIN_ALPHA_FROM_NOISE = 5e-3
# Keeps x0 finite when the estimate is asked for at alpha = 0 nevertheless.
TINY_ALPHA = 1e-8


class AnglePath(Path):
    """x_u = cos(u) x0 + sin(u) eps: the position on the path is the angle between data and noise."""

    def alpha_sigma(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return u.cos(), u.sin()

    def derivatives(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return -u.sin(), u.cos()


@dataclass(kw_only=True)
class DDPM(Objective):
    """DDPM with the simple (unweighted) loss, one time per packed sample.

    Args:
        schedule: how noise grows over time.
        prediction: what the network outputs: the noise, the clean latent, or v = alpha eps - sigma x0. Training and
            sampling both follow it.
        discrete_steps: length of the table of steps; step k is told to the network as k / discrete_steps. None for
            continuous time in [0, 1].
        loss_kind: pointwise error.

    Raises:
        ConfigError: an unknown choice, or a table too short for its schedule.

    Source: Ho et al. 2020, arXiv:2006.11239, Eq. 4 and 14; v, Salimans and Ho 2022, arXiv:2202.00512, Appendix D.
    """

    schedule: ScheduleName = "linear"
    prediction: Prediction = "noise"
    discrete_steps: Optional[int] = None
    loss_kind: LossKind = "l2"

    def __post_init__(self) -> None:
        self.path = AnglePath()
        check_choice("prediction", self.prediction, Prediction)
        check_choice("loss_kind", self.loss_kind, LossKind)
        check_ranges("objective", self, {"discrete_steps": whole(1, 1_000_000)})
        self.noise_schedule = make_schedule(self.schedule, self.discrete_steps)

    def level(self, quantile_S: Tensor) -> Tensor:
        """Return the angle drawn by each quantile, float64."""
        return self.noise_schedule.angle(self.noise_schedule.training_time(quantile_S.double()))

    def prepare(self, batch: PackedBatch, noise: AddressedNoise) -> Prepared:
        """Corrupt a packed micro-batch and state what the backbone must output.

        Returns:
            Prepared, all float32: inputs_TC = alpha x0 + sigma eps, time_S in [0, 1], target_TC as `prediction` says
            and the batch's own loss weights.
        """
        x0_TC = batch.latents_TC.float()
        # The S scalars are made in float64: alpha = cos(phi) has few digits left near pure noise.
        t_S = self.noise_schedule.training_time(noise.level_S().double())
        alpha_S, sigma_S = self.path.alpha_sigma(self.noise_schedule.angle(t_S))
        alpha_T1, sigma_T1 = (batch.layout.per_token(x.float()) for x in (alpha_S, sigma_S))
        eps_TC = noise.normal_TC("eps", x0_TC.shape[-1])
        if self.prediction == "noise":
            target_TC = eps_TC
        elif self.prediction == "x0":
            target_TC = x0_TC
        else:
            target_TC = alpha_T1 * eps_TC - sigma_T1 * x0_TC
        return Prepared(
            inputs_TC=alpha_T1 * x0_TC + sigma_T1 * eps_TC,
            time_S=t_S.float(),
            target_TC=target_TC,
            weight_S=sample_weights(batch),
        )

    def denoise(self, network: Network, x_TC: Tensor, u: Tensor, layout: SequenceLayout) -> Tensor:
        """Return x0 from the network's noise, x0 or v at the angle `u`."""
        alpha, sigma = self.path.alpha_sigma(u)
        output_TC = network(x_TC.float(), shared_time(self.noise_schedule.time(u), layout)).to(x_TC.dtype)
        if self.prediction == "noise":
            return (x_TC - sigma * output_TC) / alpha.clamp(min=TINY_ALPHA)
        if self.prediction == "x0":
            return output_TC
        return alpha * x_TC - sigma * output_TC

    def sampling_grid(self, num_steps: int) -> Tensor:
        """Return angles evenly spaced in time, then 0; on a table, only angles the network was trained at.

        Raises:
            ConfigError: `num_steps` is below 1 or above the length of the table.
        """
        if num_steps < 1:
            raise ConfigError(f"num_steps={num_steps} must be at least 1")
        max_angle = math.acos(MIN_ALPHA_FROM_NOISE) if self.prediction == "noise" else math.pi / 2
        angles = self.noise_schedule.sampling_angles(num_steps, max_angle)
        return torch.cat([angles, torch.zeros(1, dtype=torch.float64)])
