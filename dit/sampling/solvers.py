"""Solvers: integrate from noise to data with a denoiser, on any noising path.

A solver depends neither on the network nor on the objective. It calls `denoiser(x_TC, u)` for the clean estimate x0 and
the path x_u = alpha x0 + sigma eps for its coefficients, and uses two identities at a fixed estimate:

    x_s   = alpha_s x0 + (sigma_s / sigma_t) (x_t - alpha_t x0)
    dx/du = alpha' x0 + sigma' eps,  eps = (x - alpha x0) / sigma

Nothing divides by alpha, so sampling may start at pure noise (flow time 1, angle pi / 2). Every solver ends with the
clean estimate, the limit of both identities for sigma to 0 (Heun's last step is of first order, as in Karras et al.).
Coefficients are float64; the state keeps the precision of its start.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Optional

import torch
from torch import Tensor

from dit.errors import ConfigError
from dit.objectives.base import Path
from dit.objectives.edm import VarianceExplodingPath
from dit.settings import SamplingConfig

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""Maps x_TC and the path position u (float64 scalar on the host) to the clean estimate x0_TC."""

Reverse = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps (x_TC, u) to x0_TC and to the fraction of a learned variance, see `FRACTIONS`."""

NoiseAt = Callable[[int], Tensor]
"""Returns the standard normal noise_TC of a step, counted from 0."""


def euler(denoiser: Denoiser, path: Path, x_TC: Tensor, grid: Tensor) -> Tensor:
    """Follow the probability flow by straight steps in u: first order, one network call per step.

    Source: Song et al. 2021, arXiv:2011.13456, Eq. 13, written along the path.
    """
    for u, u_next in pairwise(grid):
        x0_TC = denoiser(x_TC, u)
        x_TC = x0_TC if u_next == 0 else x_TC + float(u_next - u) * _derivative(path, x_TC, x0_TC, u)
    return x_TC


@dataclass(frozen=True)
class Churn:
    """Noise that raises sigma before a step of `heun`, on the path x = x0 + sigma eps.

    Attributes:
        gamma: sigma is multiplied by 1 + gamma if it is between `s_tmin` and `s_tmax`.
        s_noise: standard deviation of the noise before scaling; above 1 restores detail that the network loses.

    Source: Karras et al. 2022, arXiv:2206.00364, Algorithm 2, lines 4 to 6.
    """

    gamma: float
    s_tmin: float
    s_tmax: float
    s_noise: float

    @classmethod
    def of(cls, sampling: SamplingConfig) -> Optional["Churn"]:
        """Return the churn in the settings; None if it is off."""
        if sampling.churn is None:
            return None
        s_churn, s_tmin, s_tmax, s_noise = sampling.churn
        return cls(min(s_churn / sampling.num_steps, math.sqrt(2) - 1), s_tmin, s_tmax, s_noise)

    def raised(self, x_TC: Tensor, sigma: Tensor, eps_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state with the added noise, and its sigma."""
        if not self.s_tmin <= float(sigma) <= self.s_tmax:
            return x_TC, sigma
        new_sigma = sigma * (1 + self.gamma)
        return x_TC + float((new_sigma**2 - sigma**2).sqrt()) * self.s_noise * eps_TC.to(x_TC), new_sigma


def heun(
    denoiser: Denoiser,
    path: Path,
    x_TC: Tensor,
    grid: Tensor,
    *,
    churn: Optional[Churn] = None,
    noise_at: Optional[NoiseAt] = None,
) -> Tensor:
    """Follow the probability flow by the trapezoid rule in u: second order, two network calls per step (last: one).

    The correction uses the slope at the Euler point (x_next, u_next).

    Source: Karras et al. 2022, arXiv:2206.00364, Algorithm 1; Algorithm 2 with `churn`.
    """
    for step, (u, u_next) in enumerate(pairwise(grid)):
        if churn is not None and noise_at is not None:
            x_TC, u = churn.raised(x_TC, u, noise_at(step))
        x0_TC = denoiser(x_TC, u)
        if u_next == 0:
            return x0_TC
        h = float(u_next - u)
        slope_TC = _derivative(path, x_TC, x0_TC, u)
        x_next_TC = x_TC + h * slope_TC
        slope_next_TC = _derivative(path, x_next_TC, denoiser(x_next_TC, u_next), u_next)
        x_TC = x_TC + h / 2 * (slope_TC + slope_next_TC)
    return x_TC


def ddim(denoiser: Denoiser, path: Path, x_TC: Tensor, grid: Tensor) -> Tensor:
    """Renoise the clean estimate to the next level without fresh noise: first order, one network call per step.

    Source: Song et al. 2021, arXiv:2010.02502, Eq. 12 with sigma 0, for any alpha and sigma.
    """
    for u, u_next in pairwise(grid):
        x0_TC = denoiser(x_TC, u)
        x_TC = x0_TC if u_next == 0 else _renoised(path, x_TC, x0_TC, u, u_next, 0.0)
    return x_TC


def ancestral(
    denoiser: Denoiser | Reverse, path: Path, x_TC: Tensor, grid: Tensor, *, noise_at: NoiseAt, variance: str
) -> Tensor:
    """Draw each level from a Gaussian around the posterior's mean: stochastic, one network call per step.

    On the full table of steps of a DDPM this is its reverse chain. On a subset of the table it is the reverse chain of
    the respaced process, with beta and posterior computed from the selected levels.

    Source: Ho et al. 2020, arXiv:2006.11239, Eq. 7 and section 3.2, for the mean and the two fixed variances; Nichol
    and Dhariwal 2021, arXiv:2102.09672, Eq. 15 and section 4, for the variance between them and for respacing.
    """
    fixed = FRACTIONS[variance]
    for step, (u, u_next) in enumerate(pairwise(grid)):
        estimate: Any = denoiser(x_TC, u)
        x0_TC, fraction = estimate if fixed is None else (estimate, fixed)
        if u_next == 0:
            return x0_TC
        small, large = _reverse_stds(path, u, u_next)
        x_TC = _renoised(path, x_TC, x0_TC, u, u_next, small)
        x_TC = x_TC + small ** (1 - fraction) * large**fraction * noise_at(step).to(x_TC)
    return x_TC


def dpmpp_2m(denoiser: Denoiser, path: Path, x_TC: Tensor, grid: Tensor) -> Tensor:
    """Extrapolate the clean estimate from the last two: second order, one network call per step.

    h is the step in log(alpha / sigma). The step after an infinite one (the first, from alpha = 0) is of first order.

    Source: Lu et al. 2022, DPM-Solver++, arXiv:2211.01095, Algorithm 2.
    """
    previous_TC: Optional[Tensor] = None
    h_previous = math.inf
    for u, u_next in pairwise(grid):
        x0_TC = denoiser(x_TC, u)
        if u_next == 0:
            return x0_TC
        (alpha, sigma), (alpha_next, sigma_next) = _alpha_sigma(path, u), _alpha_sigma(path, u_next)
        h = math.log(alpha_next * sigma / (sigma_next * alpha)) if alpha > 0 else math.inf
        estimate_TC = x0_TC
        if previous_TC is not None and h_previous < math.inf:
            estimate_TC = x0_TC + h / (2 * h_previous) * (x0_TC - previous_TC)
        x_TC = _renoised(path, x_TC, estimate_TC, u, u_next, 0.0)
        previous_TC, h_previous = x0_TC, h
    return x_TC


SOLVERS: dict[str, Callable[..., Tensor]] = {
    "euler": euler,
    "heun": heun,
    "ddim": ddim,
    "ancestral": ancestral,
    "dpmpp_2m": dpmpp_2m,
}
"""By name; the last step of each has one network call."""

FRACTIONS: dict[str, Optional[float]] = {"small": 0.0, "large": 1.0, "learned": None}
"""Variances of `ancestral`, as a position between the posterior's (0) and beta (1); None if the network predicts it."""


def solve(
    name: str,
    denoiser: Denoiser | Reverse,
    path: Path,
    x_TC: Tensor,
    grid: Tensor,
    *,
    noise_at: Optional[NoiseAt] = None,
    variance: str = "small",
    churn: Optional[Churn] = None,
) -> Tensor:
    """Integrate from `x_TC` at `grid[0]` to clean latents at 0.

    Args:
        denoiser: a `Reverse` for `ancestral` with a learned variance.
        x_TC: start, sigma(grid[0]) times standard normal noise.
        grid: decreasing positions that end with 0 (`objective.sampling_grid`).
        noise_at: fresh noise per step; needed for `ancestral`, and for `heun` with churn.
        variance: only for `ancestral`.
        churn: only for `heun`, on the path of EDM.
    """
    if grid.dim() != 1 or len(grid) < 2 or grid[-1] != 0 or not bool((grid.diff() < 0).all()):
        raise ConfigError(
            f"a sampling grid must decrease strictly and end with 0, got {grid.tolist()}; "
            "take it from the objective's sampling_grid"
        )
    if churn is not None and not isinstance(path, VarianceExplodingPath):
        raise ConfigError(
            f"churn raises sigma of EDM's path, got {type(path).__name__}; use objective=edm, or churn=None"
        )
    options: dict[str, Any] = {}
    if name == "ancestral":
        options = {"noise_at": noise_at, "variance": variance}
    if name == "heun":
        options = {"noise_at": noise_at, "churn": churn}
    return SOLVERS[name](denoiser, path, x_TC, grid.to("cpu", torch.float64), **options)


def _alpha_sigma(path: Path, u: Tensor) -> tuple[float, float]:
    alpha, sigma = path.alpha_sigma(u)
    return float(alpha), float(sigma)


def _reverse_stds(path: Path, u: Tensor, u_next: Tensor) -> tuple[float, float]:
    """Return two standard deviations of x_s given x_t: that of the posterior given x0, and sqrt(beta) of the step.

    Their squares are sigma_s**2 (1 - SNR_t / SNR_s) and sigma_t**2 (1 - SNR_t / SNR_s), for any alpha and sigma.
    """
    (alpha, sigma), (alpha_next, sigma_next) = _alpha_sigma(path, u), _alpha_sigma(path, u_next)
    scale = math.sqrt(1 - (alpha * sigma_next / (alpha_next * sigma)) ** 2)
    return sigma_next * scale, sigma * scale


def _renoised(path: Path, x_TC: Tensor, x0_TC: Tensor, u: Tensor, u_next: Tensor, fresh: float) -> Tensor:
    """Return the mean of x_s given x_t and x0, before noise of standard deviation `fresh` is added."""
    (alpha, sigma), (alpha_next, sigma_next) = _alpha_sigma(path, u), _alpha_sigma(path, u_next)
    return alpha_next * x0_TC + math.sqrt(sigma_next**2 - fresh**2) / sigma * (x_TC - alpha * x0_TC)


def _derivative(path: Path, x_TC: Tensor, x0_TC: Tensor, u: Tensor) -> Tensor:
    """Return dx/du of the probability flow at a fixed clean estimate."""
    alpha, sigma = _alpha_sigma(path, u)
    d_alpha, d_sigma = (float(d) for d in path.derivatives(u))
    return d_alpha * x0_TC + d_sigma / sigma * (x_TC - alpha * x0_TC)
