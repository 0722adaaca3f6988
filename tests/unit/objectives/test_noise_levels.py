"""Laws of the noise-level distributions and of the DDPM schedules."""

import math

import pytest
import torch

from dit.errors import ConfigError
from dit.objectives.ddpm import DDPM
from dit.objectives.noise_levels import (
    PUBLISHED_BETAS,
    discrete_betas,
    log_normal,
    logit_normal,
    make_schedule,
    shift_time,
)

QUANTILES = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
NAMES = ("linear", "cosine", "scaled_linear")
HALF_PI = math.pi / 2


def test_log_normal_has_its_analytic_moments():
    """Median exp(mean), mean exp(mean + std**2 / 2), and the logarithm has the requested mean and deviation."""
    sigma = log_normal(QUANTILES, -1.2, 1.2)
    assert sigma.median().item() == pytest.approx(math.exp(-1.2), rel=1e-4)
    assert sigma.mean().item() == pytest.approx(math.exp(-1.2 + 1.2**2 / 2), rel=1e-3)
    assert sigma.log().mean().item() == pytest.approx(-1.2, abs=1e-6)
    assert sigma.log().std().item() == pytest.approx(1.2, rel=1e-3)


def test_logit_normal_has_its_quantiles_and_moments():
    """The logit is normal; with mean 0, times are symmetric about one half."""
    t = logit_normal(QUANTILES, 0.3, 0.8)
    assert t.logit().mean().item() == pytest.approx(0.3, abs=1e-6)
    assert t.logit().std().item() == pytest.approx(0.8, rel=1e-3)
    symmetric = logit_normal(QUANTILES, 0.0, 1.0)
    torch.testing.assert_close(symmetric + symmetric.flip(0), torch.ones_like(symmetric))


def test_distributions_are_monotone_and_finite_in_float32():
    """A larger quantile is always a noisier sample, also for the extreme draws of addressed noise."""
    q = torch.cat([torch.tensor([2.0**-24]), torch.linspace(0.001, 0.999, 999), torch.tensor([1 - 2.0**-24])])
    for x in (log_normal(q, -1.2, 1.2), logit_normal(q, 0.0, 1.0), shift_time(q, 3.0)):
        assert x.dtype == torch.float32
        assert x.isfinite().all()
        assert (x.diff() > 0).all()


def test_time_shift_multiplies_the_odds():
    """t' / (1 - t') = shift * t / (1 - t); so shifts compose by multiplication, 1 is the identity, and 0 and 1 stay."""
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    torch.testing.assert_close((shift_time(t, 3.0) / (1 - shift_time(t, 3.0))), 3 * t / (1 - t))
    torch.testing.assert_close(shift_time(shift_time(t, 3.0), 2.0), shift_time(t, 6.0))
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert torch.equal(shift_time(ends, 3.0), ends)
    assert torch.equal(shift_time(t, 1.0), t)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [None, 1000, 50])
def test_schedules_grow_and_invert(name, steps):
    """The angle grows strictly with time and stays in (0, pi / 2]; `time` is its inverse."""
    schedule = make_schedule(name, steps)
    n = steps or 500
    t = torch.arange(n, dtype=torch.float64) / n
    angle = schedule.angle(t)
    assert (angle.diff() > 0).all()
    assert angle[0] >= 0
    assert angle[-1] <= HALF_PI
    # 1e-8: the linear schedule takes the square root of one rounding error at t = 0.
    torch.testing.assert_close(schedule.time(angle), t, atol=1e-8, rtol=0)
    ends = schedule.time(torch.tensor([0.0, HALF_PI], dtype=torch.float64))
    assert ends.tolist() == pytest.approx([0.0, 1.0 if steps is None else (n - 1) / n])


@pytest.mark.parametrize("name", NAMES)
def test_table_is_the_cumulative_product_of_its_betas(name):
    """cos(phi_k)**2 is the product of 1 - beta up to step k."""
    table = make_schedule(name, 1000)
    betas = discrete_betas(name, 1000)
    alpha2 = table.angle(torch.arange(1000, dtype=torch.float64) / 1000).cos().square()
    torch.testing.assert_close(alpha2, (1 - betas).cumprod(0), rtol=1e-9, atol=1e-15)


def test_tables_have_the_published_constants():
    """The first and last beta, and the final alpha-bar."""
    linear, scaled, cosine = (discrete_betas(n, 1000) for n in ("linear", "scaled_linear", "cosine"))
    assert [linear[0].item(), linear[-1].item()] == pytest.approx([1e-4, 0.02])
    assert (1 - linear).prod().item() == pytest.approx(4.0358e-5, rel=1e-4)
    assert [scaled[0].item(), scaled[-1].item()] == pytest.approx(list(PUBLISHED_BETAS["scaled_linear"]))
    assert scaled[500].sqrt().item() == pytest.approx(
        sum(math.sqrt(b) * w for b, w in zip(PUBLISHED_BETAS["scaled_linear"], (499 / 999, 500 / 999)))
    )
    assert (1 - scaled).prod().sqrt().item() == pytest.approx(0.0682649, rel=1e-5)
    f = [math.cos((k / 1000 + 0.008) / 1.008 * HALF_PI) ** 2 for k in range(1001)]
    assert cosine[0].item() == pytest.approx(1 - f[1] / f[0])
    assert (1 - cosine[:500]).prod().item() == pytest.approx(f[500] / f[0])
    assert cosine[-1].item() == 0.999


def test_continuous_schedules_have_the_published_log_snr():
    """Imagen's closed forms for continuous time."""
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    log_snr = {n: -2 * make_schedule(n, None).angle(t).tan().log() for n in ("linear", "cosine")}
    torch.testing.assert_close(log_snr["linear"], -torch.expm1(1e-4 + 10 * t**2).log())
    cosine = ((t + 0.008) / 1.008 * HALF_PI).cos() ** -2 - 1
    torch.testing.assert_close(log_snr["cosine"], -cosine.log())
    assert make_schedule("cosine", None).angle(torch.ones(1, dtype=torch.float64)).item() == pytest.approx(HALF_PI)


SET = [2e-4, 0.013]
LIMITS = [
    *(("linear", None, 0.015), ("scaled_linear", None, 0.001), ("cosine", None, 0.008)),
    *(("linear", SET, 0.0015), ("scaled_linear", SET, 0.0015)),
]


@pytest.mark.parametrize(("name", "betas", "distance"), LIMITS)
def test_continuous_time_is_the_limit_of_the_table(name, betas, distance):
    """The angle after step k of 1000 is that of time (k + 1) / 1000, within the given distance; `time` inverts it."""
    t = torch.arange(1000, dtype=torch.float64) / 1000
    continuous = make_schedule(name, None, betas)
    gap = make_schedule(name, 1000, betas).angle(t) - continuous.angle(t + 1e-3)
    assert gap.abs().max().item() < distance
    torch.testing.assert_close(continuous.time(continuous.angle(t)), t, atol=1e-8, rtol=0)


@pytest.mark.parametrize("name", ["linear", "scaled_linear"])
def test_the_configured_betas_are_the_ends_of_the_table(name):
    """Setting the published betas changes nothing; another number of steps scales them."""
    table = discrete_betas(name, 1000, SET)
    assert [table[0].item(), table[-1].item()] == pytest.approx([2e-4, 0.013])
    assert torch.equal(discrete_betas(name, 1000, PUBLISHED_BETAS[name]), discrete_betas(name, 1000))
    torch.testing.assert_close(discrete_betas(name, 250, SET)[[0, -1]], 4 * table[[0, -1]])
    assert torch.equal(DDPM(schedule=name, discrete_steps=1000, betas=SET).noise_schedule.betas, table)


def test_shorter_tables_end_at_the_same_noise():
    """beta scales with 1000 / N, so the final noise hardly depends on the number of steps."""
    for name in NAMES:
        ends = [make_schedule(name, n).sampling_angles(1, HALF_PI).item() for n in (250, 1000)]
        assert ends[0] == pytest.approx(ends[1], abs=0.02)


def test_training_visits_every_step_equally_often():
    """A table of N steps divides the quantiles into N equal parts."""
    table = make_schedule("linear", 40)
    q = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    steps = (table.training_time(q) * 40).round().long()
    assert torch.equal(steps.bincount(), torch.full((40,), 100))
    assert table.training_time(torch.tensor([1 - 2.0**-24])).item() == pytest.approx(39 / 40)


def test_sampling_angles_lie_on_the_table_and_start_at_its_end():
    """Trailing spacing: the noisiest step first, then distinct trained steps; N of N steps are all of them."""
    table = make_schedule("linear", 1000)
    angles = table.angle(torch.arange(1000, dtype=torch.float64) / 1000)
    for n in (1, 7, 30, 999, 1000):
        grid = table.sampling_angles(n, HALF_PI)
        assert grid[0] == angles[-1]
        assert len(grid) == n
        assert (grid.diff() < 0).all()
        assert torch.isin(grid, angles).all()
    assert torch.equal(table.sampling_angles(1000, HALF_PI), angles.flip(0))


def test_sampling_angles_respect_the_largest_angle_unless_every_step_is_used():
    """Twenty steps start at the largest allowed angle; using every step gives the chain as trained."""
    for steps in (None, 1000):
        grid = make_schedule("cosine", steps).sampling_angles(20, 1.5)
        assert 1.498 < grid[0] <= 1.5 + 1e-12
    table = make_schedule("cosine", 1000)
    assert table.sampling_angles(1000, 1.5)[0] == table.sampling_angles(1, HALF_PI)[0] > 1.57


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: discrete_betas("linear", 20), "use at least 21 steps"),
        (lambda: make_schedule("cosine", 1000, SET), r"betas=\[0.0002.*cosine schedule has no betas to set"),
        (lambda: make_schedule("cosine", None, SET), "cosine schedule has no betas to set"),
        (lambda: make_schedule("linear", 1000, [0.03]), r"betas=\[0.03\] must be two increasing numbers"),
        (lambda: make_schedule("linear", None, [0.01, 0.01]), "must be two increasing numbers"),
        (lambda: DDPM(betas=[0.1, 1.0]), r"objective.betas=\[0.1, 1.0\] .*above 0 and below 1"),
        (
            lambda: make_schedule("linear", 50).sampling_angles(51, HALF_PI),
            "51 sampling steps .* discrete_steps=50",
        ),
    ],
)
def test_impossible_schedules_are_refused_with_a_cure(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_shortest_table_named_in_the_refusal_works():
    assert discrete_betas("linear", 21).max() < 1
    assert discrete_betas("scaled_linear", 13).max() < 1
