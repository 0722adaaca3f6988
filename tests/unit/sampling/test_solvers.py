"""Solvers on Gaussian data, for which denoiser, probability flow and all marginals are known in closed form."""

import math
import operator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.base import Objective, Path
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.sampling.solvers import FRACTIONS, SOLVERS, Denoiser, ddim, dpmpp_2m, euler, solve
from dit.settings import SamplingConfig

STD = 0.5
# Position on each path as a function of sigma / alpha.
POSITION = {"EDM": lambda r: r, "FlowMatching": lambda r: r / (1 + r), "DDPM": torch.atan}
PATHS = [EDM(), FlowMatching(), DDPM()]
every_path = pytest.mark.parametrize("objective", PATHS, ids=lambda o: type(o).__name__)
ORDERS = {"euler": 1, "heun": 2, "ddim": 1, "ancestral": 1, "dpmpp_2m": 2}
"""The error of the deterministic part decreases as the number of steps to the power of minus this."""
DETERMINISTIC = [name for name in SOLVERS if name != "ancestral"]


def gaussian_denoiser(path: Path, x_TC: Tensor, u: Tensor) -> Tensor:
    """Return E[x0 | x_u] for x0 ~ N(0, STD**2)."""
    alpha, sigma = path.alpha_sigma(u)
    return alpha * STD**2 / (alpha**2 * STD**2 + sigma**2) * x_TC


def relative_error(name: str, objective: Objective, grid: Tensor) -> float:
    """Return the error against the exact flow, which scales x with the marginal deviation."""
    alpha, sigma = objective.path.alpha_sigma(grid[0])
    start = torch.ones(1, 1, dtype=torch.float64)
    end = solve(name, partial(gaussian_denoiser, objective.path), objective.path, start, grid)
    return abs(end.item() * math.hypot(alpha * STD, sigma) / STD - 1)


def log_ratio_grid(objective: Objective, num_steps: int) -> Tensor:
    """Return positions nearly even in log(sigma / alpha), then 0, so that errors at the ends stay below 1e-7.

    The warp breaks a symmetry of the circle under which Euler's first-order error cancels.
    """
    s = torch.linspace(0, 1, num_steps, dtype=torch.float64)
    ratio = (8 - 16 * (s + 0.3 * s * (1 - s))).exp()
    return torch.cat([POSITION[type(objective).__name__](ratio), torch.zeros(1, dtype=torch.float64)])


@every_path
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_solver_has_its_order_on_every_path(name, objective):
    """Halving the step divides the error by 2**order."""
    coarse, fine = (relative_error(name, objective, log_ratio_grid(objective, n)) for n in (512, 1024))
    assert math.log2(coarse / fine) == pytest.approx(ORDERS[name], abs=0.2)


@pytest.mark.parametrize("objective", [EDM(), FlowMatching(), FlowMatching(time_shift=3.0)], ids=repr)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_solver_keeps_its_order_on_the_grid_of_the_objective(name, objective):
    """From pure noise, also if alpha is 0; there, the multistep solver is slower by a logarithm of n."""
    coarse, fine = (relative_error(name, objective, objective.sampling_grid(n)) for n in (128, 256))
    expected = ORDERS[name]
    assert math.log2(coarse / fine) > expected - (0.5 if name == "dpmpp_2m" else 0.1)


@every_path
def test_solvers_are_exact_when_the_estimate_is_constant(objective):
    """All data are one point: every solver reaches it, because the last step returns the clean estimate."""
    point = torch.tensor([[0.3, -0.7]], dtype=torch.float64)
    for name in SOLVERS:
        noise = torch.Generator().manual_seed(0)
        end = solve(
            name,
            lambda x, u: point,
            objective.path,
            torch.randn(1, 2, dtype=torch.float64, generator=noise),
            objective.sampling_grid(5),
            noise_at=lambda step: torch.zeros(1, 2),
        )
        assert torch.equal(end, point)


@every_path
def test_euler_is_ddim_on_straight_paths_only(objective):
    """If alpha and sigma are linear in u, both are one method; on the circle they differ in second order."""
    grid = objective.sampling_grid(20)
    x = torch.ones(1, 1, dtype=torch.float64)
    denoiser = partial(gaussian_denoiser, objective.path)
    gap = abs(euler(denoiser, objective.path, x, grid) - ddim(denoiser, objective.path, x, grid)).item()
    assert (gap < 1e-12) == (not isinstance(objective, DDPM))


@pytest.mark.parametrize("name", ["ddim", "ancestral", "dpmpp_2m"])
def test_exponential_solvers_do_not_depend_on_the_path(name):
    """x / alpha only depends on sigma / alpha, so three paths with the same ratios give the same sample."""
    ends = []
    for objective in PATHS:
        grid = log_ratio_grid(objective, 30)
        alpha, _ = objective.path.alpha_sigma(grid[0])
        noise = torch.Generator().manual_seed(0)
        start = alpha * math.exp(8) * torch.ones(1, 3, dtype=torch.float64)
        draw = partial(torch.randn, 1, 3, dtype=torch.float64, generator=noise)
        denoiser = partial(gaussian_denoiser, objective.path)
        ends.append(solve(name, denoiser, objective.path, start, grid, noise_at=lambda step, d=draw: d()))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-9, atol=1e-12)


@every_path
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_solver_calls_the_network_as_often_as_documented(name, objective):
    """Two calls of Heun and one of the others in every step except the last, which has one; no call at u = 0."""
    calls = []

    def denoiser(x_TC, u):
        calls.append(float(u))
        return gaussian_denoiser(objective.path, x_TC, u)

    x = torch.ones(1, 1)
    solve(name, denoiser, objective.path, x, objective.sampling_grid(9), noise_at=lambda step: x)
    assert len(calls) == 8 * (2 if name == "heun" else 1) + 1
    assert min(calls) > 0


@pytest.mark.parametrize("variance", ["small", "large", "learned"])
def test_ancestral_sampling_equals_the_reverse_chain_of_the_table(variance: str) -> None:
    """x_{k-1} = (x_k - (1 - a) / sqrt(1 - abar) eps) / sqrt(a) + sqrt(variance) z.

    The variance is (1 - abar') / (1 - abar) beta, beta, or exp(w log of the second + (1 - w) log of the first). On a
    subset of the table, beta = 1 - abar / abar' of the remaining steps.
    """
    ddpm = DDPM(discrete_steps=1000, variance=LearnedVariance())
    layout = SequenceLayout.from_lengths([3])
    generator = torch.Generator().manual_seed(0)
    x, eps, v, z = torch.randn(4, 3, 2, dtype=torch.float64, generator=generator)
    eps, v = eps.float().double(), v.float().double()
    every = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    for num_steps, left in ((1000, 0), (1000, 499), (1000, 998), (10, 4)):
        grid, alpha_bar = ddpm.sampling_grid(num_steps), every[1000 // num_steps - 1 :: 1000 // num_steps].flip(0)
        bar, bar_next = alpha_bar[left : left + 2]
        beta = 1 - bar / bar_next
        states: list[Tensor] = []

        def denoiser(x_TC, u, states=states):
            states.append(x_TC)
            found = ddpm.denoise_with_variance(lambda *_: torch.cat([eps, v], 1).float(), x_TC, u, layout)
            return found if variance == "learned" else found[0]

        # With a third point, the step is not the last one.
        three = torch.cat([grid[left : left + 2], torch.zeros(1, dtype=torch.float64)])
        solve("ancestral", denoiser, ddpm.path, x, three, noise_at=lambda step: z, variance=variance)
        mean = (x - beta / (1 - bar).sqrt() * eps) / (1 - beta).sqrt()
        posterior, w = (1 - bar_next) / (1 - bar) * beta, (v + 1) / 2
        between = torch.exp(w * beta.log() + (1 - w) * posterior.log())
        expected = {"small": posterior, "large": beta, "learned": between}[variance]
        torch.testing.assert_close(states[1], mean + expected.sqrt() * z)


SHIFT = 0.3


def clean_mean(ddpm: DDPM, std: float, x_TC: Tensor, u: Tensor) -> Tensor:
    """Return E[x0 | x_u] for x0 ~ N(SHIFT, std**2), of states as coefficients (see `sample_moments`)."""
    alpha, sigma = ddpm.path.alpha_sigma(u)
    constant_TC = SHIFT * torch.eye(1, x_TC.shape[-1], dtype=torch.float64)
    return constant_TC + alpha * std**2 / (alpha**2 * std**2 + sigma**2) * (x_TC - alpha * constant_TC)


def sample_moments(
    name: str, ddpm: DDPM, std: float, num_steps: int, denoiser: Denoiser, **options: Any
) -> tuple[float, float]:
    """Return mean and deviation of samples of N(SHIFT, std**2), drawn from the exact marginal.

    Every state is a sum of a constant, the start and the noises; columns have its coefficients, and nothing is drawn.
    """
    column, grid = torch.eye(num_steps + 1, dtype=torch.float64)[:, None], ddpm.sampling_grid(num_steps)
    alpha, sigma = ddpm.path.alpha_sigma(grid[0])
    start = alpha * SHIFT * column[0] + (alpha**2 * std**2 + sigma**2).sqrt() * column[1]
    noise_at = partial(operator.getitem, column[2:])
    x_TC = solve(name, denoiser, ddpm.path, start, grid, noise_at=noise_at, **options)
    return x_TC[0, 0].item(), x_TC[0, 1:].norm().item()


def last_deviation(ddpm: DDPM, std: float, num_steps: int) -> float:
    """Return the deviation of E[x0 | x] at the last level above 0, which is the last step of every solver."""
    alpha, sigma = ddpm.path.alpha_sigma(ddpm.sampling_grid(num_steps)[-2])
    return (std**2 * alpha / (alpha**2 * std**2 + sigma**2).sqrt()).item()


def perfect_network(ddpm: DDPM, std: float, x_TC: Tensor, time_S: Tensor) -> Tensor:
    """Return the noise, x0 or v that a perfect network predicts for N(SHIFT, std**2)."""
    u = ddpm.noise_schedule.angle(time_S[0].double())
    alpha, sigma = ddpm.path.alpha_sigma(u)
    x0_TC = clean_mean(ddpm, std, x_TC, u)
    eps_TC = (x_TC - alpha * x0_TC) / sigma
    return {"noise": eps_TC, "x0": x0_TC, "v": alpha * eps_TC - sigma * x0_TC}[ddpm.prediction]


SAMPLERS = {
    **{name: (name, {}) for name in DETERMINISTIC},
    **{f"ancestral_{variance}": ("ancestral", {"variance": variance}) for variance in ("small", "large")},
}
SINGLE = 1e-5  # networks get float32


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_known_gaussian_is_sampled_by_every_sampler_from_every_prediction(sampler: str, schedule: Any) -> None:
    """Mean and deviation converge to those of the data in the order of the solver, equally from noise, x0 and v.

    With beta, a chain has too much variance, and with the posterior's too little, unless the data are white or one
    point.
    """
    name, options = SAMPLERS[sampler]

    def moments(prediction: Any, num_steps: int, *, exact: bool) -> tuple[float, float]:
        ddpm, layout = DDPM(schedule=schedule, prediction=prediction), SequenceLayout.from_lengths([1])
        network, estimate = partial(perfect_network, ddpm, STD), partial(clean_mean, ddpm, STD)
        if not exact:
            estimate = partial(ddpm.denoise, network, layout=layout)
        return sample_moments(name, ddpm, STD, num_steps, estimate, **options)

    for prediction in ("noise", "x0", "v"):
        assert moments(prediction, 20, exact=False) == pytest.approx(moments(prediction, 20, exact=True), rel=SINGLE)
    errors = []
    for num_steps in (100, 200):
        mean, deviation = moments("v", num_steps, exact=True)
        # Straight steps in the angle follow the mean only to their order, the other solvers follow it exactly.
        assert mean == pytest.approx(SHIFT, rel=0.02 if name in ("euler", "heun") else 1e-12)
        expected = last_deviation(DDPM(schedule=schedule, prediction="v"), STD, num_steps)
        errors.append(deviation / expected - 1)
    assert math.log2(errors[0] / errors[1]) == pytest.approx(ORDERS[name], abs=0.4)
    if name == "ancestral":
        assert (errors[1] > 0) == (options["variance"] == "large")


def test_multistep_solver_is_first_order_after_zero_alpha():
    """The first two steps from flow time 1 are DDIM steps, because log(alpha / sigma) starts at minus infinity."""
    flow = FlowMatching()
    grid = torch.tensor([1.0, 0.8, 0.5, 0.0], dtype=torch.float64)
    x = torch.ones(1, 1, dtype=torch.float64)
    denoiser = partial(gaussian_denoiser, flow.path)
    assert torch.equal(dpmpp_2m(denoiser, flow.path, x, grid), ddim(denoiser, flow.path, x, grid))
    longer = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0], dtype=torch.float64)
    assert not torch.equal(dpmpp_2m(denoiser, flow.path, x, longer), ddim(denoiser, flow.path, x, longer))


@every_path
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_state_has_the_precision_of_its_start(name, objective):
    """Single and double precision stay what they are in every step."""
    grid = objective.sampling_grid(12)
    seen = set()

    def denoiser(x_TC, u):
        seen.add(x_TC.dtype)
        return gaussian_denoiser(objective.path, x_TC, u)

    single, double = (
        solve(
            name, denoiser, objective.path, torch.ones(1, 1, dtype=dtype), grid, noise_at=lambda step: torch.ones(1, 1)
        )
        for dtype in (torch.float32, torch.float64)
    )
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert seen == {torch.float32, torch.float64}
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)


def test_registry_has_every_solver_of_the_settings():
    """SamplingConfig.solver and SOLVERS have the same names."""
    fields = SamplingConfig.__dataclass_fields__
    assert sorted(fields["solver"].type.__args__) == sorted(SOLVERS)
    assert sorted(fields["variance"].type.__args__) == sorted(FRACTIONS)


@pytest.mark.parametrize("grid", [[1.0, 0.5], [0.5, 1.0, 0.0], [0.0]], ids=str)
def test_a_grid_that_does_not_decrease_to_zero_is_refused(grid):
    path = FlowMatching().path
    with pytest.raises(ConfigError, match="decrease strictly and end with 0"):
        solve("euler", partial(gaussian_denoiser, path), path, torch.ones(1, 1), torch.tensor(grid))
