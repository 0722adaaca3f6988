"""Distributions of the noise level, as increasing functions of a quantile in (0, 1), and the noise schedules of DDPM.

Schedules use the angle phi, with alpha = cos(phi) and sigma = sin(phi): alpha**2 + sigma**2 = 1 by construction, clean
latents have phi = 0, pure noise has phi = pi / 2, and no formula divides by an alpha of 0.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Optional

import torch
from torch import Tensor

from dit.errors import ConfigError

ScheduleName = Literal["linear", "cosine", "scaled_linear"]

REFERENCE_STEPS = 1000
"""Length of the published tables; tables of another length scale beta so that the total noise is the same."""
PUBLISHED_BETAS = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}
POWERS = {"linear": 1, "scaled_linear": 2}  # beta ** (1 / power) increases linearly
COSINE_OFFSET = 0.008
COSINE_MAX_BETA = 0.999


def log_normal(quantile: Tensor, mean: float, std: float) -> Tensor:
    """Return the quantile of exp(N(mean, std**2)).

    Source: Karras et al. 2022, arXiv:2206.00364, Table 1 (training noise distribution).
    """
    return torch.exp(mean + std * torch.special.ndtri(quantile))


def logit_normal(quantile: Tensor, mean: float, std: float) -> Tensor:
    """Return the quantile of sigmoid(N(mean, std**2)).

    Source: Esser et al. 2024, arXiv:2403.03206, Eq. 19.
    """
    return torch.sigmoid(mean + std * torch.special.ndtri(quantile))


def shift_time(t: Tensor, time_shift: float | Tensor) -> Tensor:
    """Shift flow time towards noise, t' = shift * t / (1 + (shift - 1) * t); a shift of 1 changes nothing.

    Source: Esser et al. 2024, arXiv:2403.03206, Eq. 23 (resolution-dependent shift).
    """
    return time_shift * t / (1 + (time_shift - 1) * t)


class Schedule(ABC):
    """A variance-preserving noise schedule: the angle phi = atan2(sigma, alpha) as a function of time t in [0, 1]."""

    @abstractmethod
    def angle(self, t: Tensor) -> Tensor:
        """Return phi at time `t`, in the dtype of `t`."""

    @abstractmethod
    def time(self, angle: Tensor) -> Tensor:
        """Return the time of a network's input at `angle`; angles outside the schedule give its ends."""

    def training_time(self, quantile: Tensor) -> Tensor:
        """Return the time at a quantile of the uniform distribution of times."""
        return quantile

    def sampling_angles(self, num_steps: int, max_angle: float) -> Tensor:
        """Return `num_steps` decreasing angles, float64, evenly spaced in time from at most `max_angle`, without 0."""
        last = self.time(torch.tensor(max_angle, dtype=torch.float64))
        return self.angle(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)[:-1] * last)


class CosineSchedule(Schedule):
    """The angle increases linearly, from just above 0 to pi / 2.

    Source: Nichol and Dhariwal 2021, arXiv:2102.09672, Eq. 17. Imagen writes it as
    log-SNR = -ln(cos((t + s) / (1 + s) * pi / 2)**-2 - 1).
    """

    def angle(self, t: Tensor) -> Tensor:
        return (t + COSINE_OFFSET) / (1 + COSINE_OFFSET) * (math.pi / 2)

    def time(self, angle: Tensor) -> Tensor:
        return (angle * (2 / math.pi) * (1 + COSINE_OFFSET) - COSINE_OFFSET).clamp(0, 1)


class LinearSchedule(Schedule):
    """beta increases linearly with time: -ln(alpha**2) = 1e-4 + 10 t**2.

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, log-SNR = -ln(expm1(1e-4 + 10 t**2)), within 0.015 rad of
    the 1000-step table of Ho et al. 2020, arXiv:2006.11239.
    """

    def angle(self, t: Tensor) -> Tensor:
        return _angle_of_decay(1e-4 + 10 * t.square())

    def time(self, angle: Tensor) -> Tensor:
        return ((_decay_of_angle(angle) - 1e-4).clamp(min=0) / 10).sqrt().clamp(0, 1)


class PowerSchedule(Schedule):
    """beta ** (1 / power) increases linearly with time; the limit of a table with infinitely many steps.

    -ln(alpha**2) is the integral of 1000 * (a + (b - a) t)**power. a**power and b**power are `first` and `last`, the
    betas at time 0 and 1 for one step of 1000.

    Source: power 1, Song et al. 2021, arXiv:2011.13456, Eq. 32 (VP); power 2, Rombach et al. 2022, arXiv:2112.10752.
    """

    def __init__(self, first: float, last: float, power: int) -> None:
        self.power, self.ends = power, (first ** (1 / power), last ** (1 / power))

    def angle(self, t: Tensor) -> Tensor:
        (a, b), n = self.ends, self.power + 1
        decay = REFERENCE_STEPS * ((a + (b - a) * t) ** n - a**n) / (n * (b - a))
        return _angle_of_decay(decay.clamp(min=0))  # a rounding error may be below 0 at time 0

    def time(self, angle: Tensor) -> Tensor:
        (a, b), n = self.ends, self.power + 1
        root = (a**n + n * (b - a) * _decay_of_angle(angle) / REFERENCE_STEPS) ** (1 / n)
        time: Tensor = (root - a) / (b - a)
        return time.clamp(0, 1)


class TableSchedule(Schedule):
    """A discrete schedule of N steps, counted from 0; the time of step k is k / N.

    Step 0 already has noise (beta_0 > 0). Between two steps, the network receives the time of the nearest step, because
    it was trained with no other.
    """

    def __init__(self, betas: Tensor) -> None:
        self._angles = {torch.device("cpu"): _angle_of_decay(-torch.log1p(-betas).cumsum(0))}
        self.num_steps = len(betas)
        self.betas = betas

    def angles(self, device: torch.device) -> Tensor:
        """Return phi of every step, float64 `[N]`, on `device`; it is copied there once."""
        if device not in self._angles:
            self._angles[device] = self._angles[torch.device("cpu")].to(device)
        return self._angles[device]

    def training_time(self, quantile: Tensor) -> Tensor:
        return (quantile * self.num_steps).floor().clamp(0, self.num_steps - 1) / self.num_steps

    def angle(self, t: Tensor) -> Tensor:
        return self.angles(t.device)[self.step(t)].to(t.dtype)

    def step(self, t: Tensor) -> Tensor:
        """Return the index of the step at time `t`, int64."""
        return (t * self.num_steps).round().long().clamp(0, self.num_steps - 1)

    def time(self, angle: Tensor) -> Tensor:
        angles = self.angles(angle.device)
        middles = (angles[1:] + angles[:-1]) / 2
        return torch.searchsorted(middles, angle.to(angles.dtype)).to(angle.dtype) / self.num_steps

    def sampling_angles(self, num_steps: int, max_angle: float) -> Tensor:
        angles = self.angles(torch.device("cpu"))
        if num_steps > self.num_steps:
            raise ConfigError(
                f"{num_steps} sampling steps asked of a network trained with discrete_steps={self.num_steps}; "
                f"sample with at most {self.num_steps}, or train with discrete_steps=None"
            )
        # With (nearly) as many steps as the table has, angles beyond `max_angle` are used, too.
        usable = max(int((angles <= max_angle).sum()), num_steps)
        # Trailing spacing, so that sampling starts at the noisiest step. Lin et al. 2023, arXiv:2305.08891, Table 2.
        steps = [(2 * usable * left + num_steps) // (2 * num_steps) - 1 for left in range(num_steps, 0, -1)]
        return angles[steps]


def beta_ends(name: ScheduleName, betas: Optional[Sequence[float]]) -> tuple[float, float]:
    """Return the first and the last beta of a table of 1000 steps; `betas=None` selects the published values."""
    if name == "cosine":
        raise ConfigError(
            f"objective.betas={betas}: the cosine schedule has no betas to set; use objective.schedule=linear or "
            "scaled_linear, or objective.betas=none"
        )
    if betas is None:
        return PUBLISHED_BETAS[name]
    if len(betas) != 2 or not betas[0] < betas[1]:
        raise ConfigError(
            f"objective.betas={betas} must be two increasing numbers; the published ones of the {name} schedule are "
            f"{PUBLISHED_BETAS[name]}"
        )
    return betas[0], betas[1]


def discrete_betas(name: ScheduleName, num_steps: int, betas: Optional[Sequence[float]] = None) -> Tensor:
    """Return the variance added by each of `num_steps` steps, float64; `betas` as in `beta_ends`.

    Source: linear, Ho et al. 2020, arXiv:2006.11239; cosine, Nichol and Dhariwal 2021, arXiv:2102.09672, Eq. 17 with
    beta at most 0.999; scaled_linear, Rombach et al. 2022, arXiv:2112.10752. For lengths other than 1000, the two
    linear schedules are scaled by 1000 / num_steps.
    """
    if name == "cosine" and betas is None:
        edges = torch.linspace(0, 1, num_steps + 1, dtype=torch.float64)
        alpha2 = CosineSchedule().angle(edges).cos().square()
        return (1 - alpha2[1:] / alpha2[:-1]).clamp(max=COSINE_MAX_BETA)
    first, last = beta_ends(name, betas)
    power = POWERS[name]
    roots = torch.linspace(first ** (1 / power), last ** (1 / power), num_steps, dtype=torch.float64)
    table = roots**power * (REFERENCE_STEPS / num_steps)
    if table.max() >= 1:
        fits = math.floor(REFERENCE_STEPS * last) + 1
        raise ConfigError(
            f"discrete_steps={num_steps} is too short for the {name} schedule: beta would reach "
            f"{table.max():.3g}; use at least {fits} steps, or None for continuous time"
        )
    return table


def zero_terminal_snr(betas: Tensor) -> Tensor:
    """Rescale the betas of a table so that its last step is pure noise: the last alpha becomes 0, the first one stays.

    Source: Lin et al. 2023, arXiv:2305.08891, Algorithm 1.
    """
    alpha = (1 - betas).cumprod(0).sqrt()
    alpha = (alpha - alpha[-1]) * alpha[0] / (alpha[0] - alpha[-1])
    signal = alpha.square()
    return 1 - torch.cat([signal[:1], signal[1:] / signal[:-1]])


def make_schedule(
    name: ScheduleName, discrete_steps: Optional[int], betas: Optional[Sequence[float]] = None, zero_snr: bool = False
) -> Schedule:
    """Build the schedule `name`, continuous if `discrete_steps` is None; `betas` as in `beta_ends`."""
    if discrete_steps is not None:
        table = discrete_betas(name, discrete_steps, betas)
        return TableSchedule(zero_terminal_snr(table) if zero_snr else table)
    if betas is None and name != "scaled_linear":
        return CosineSchedule() if name == "cosine" else LinearSchedule()
    return PowerSchedule(*beta_ends(name, betas), POWERS[name])


def _angle_of_decay(decay: Tensor) -> Tensor:
    """Return phi where -ln(alpha**2) = `decay`: tan(phi)**2 = sigma**2 / alpha**2 = expm1(decay)."""
    return torch.expm1(decay).sqrt().atan()


def _decay_of_angle(angle: Tensor) -> Tensor:
    """Return -ln(alpha**2) at phi."""
    return -2 * angle.cos().log()
