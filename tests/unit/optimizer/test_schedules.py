"""Learning rates: closed forms at the end points, no jump where the parts meet."""

import math
from itertools import pairwise

import pytest

from dit.errors import ConfigError
from dit.optimizer.schedules import check_schedule, learning_rate
from dit.settings import ScheduleConfig

PEAK, LOW = 3e-4, 1e-5
NUM_STEPS, WARMUP = 200, 40
KINDS = ("constant", "cosine", "one_cycle")


def rates(num_steps=NUM_STEPS, **config):
    schedule = ScheduleConfig(**config)
    return [learning_rate(step, num_steps, PEAK, schedule) for step in range(num_steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_peak_is_at_the_end_of_the_rise_and_only_there(kind):
    """The W-th update has exactly the peak; every earlier one less, later ones no more."""
    lr = rates(kind=kind, warmup_steps=WARMUP, min_lr=LOW)
    assert lr[WARMUP - 1] == PEAK
    assert all(a < b for a, b in pairwise(lr[:WARMUP]))
    assert lr[0] > 0  # the first update is not wasted
    if kind == "constant":
        assert set(lr[WARMUP - 1 :]) == {PEAK}
    else:
        assert all(a > b for a, b in pairwise(lr[WARMUP - 1 :]))


@pytest.mark.parametrize("kind", ["cosine", "one_cycle"])
def test_the_last_update_has_the_lowest_rate(kind):
    """The fall ends at `min_lr` in the last step of the run, stays there, and is half-way down half-way through."""
    schedule = ScheduleConfig(kind=kind, warmup_steps=WARMUP, min_lr=LOW)
    assert learning_rate(NUM_STEPS - 1, NUM_STEPS, PEAK, schedule) == pytest.approx(LOW, rel=1e-12)
    assert learning_rate(10 * NUM_STEPS, NUM_STEPS, PEAK, schedule) == pytest.approx(LOW, rel=1e-12)
    middle = WARMUP - 1 + (NUM_STEPS - WARMUP) // 2
    assert learning_rate(middle, NUM_STEPS, PEAK, schedule) == pytest.approx((PEAK + LOW) / 2, rel=1e-12)


def test_rises_follow_their_closed_forms():
    """Linear for warm-up, half a cosine for one_cycle."""
    linear = rates(kind="cosine", warmup_steps=WARMUP)
    cosine = rates(kind="one_cycle", warmup_steps=WARMUP)
    for step in range(WARMUP):
        part = (step + 1) / WARMUP
        assert linear[step] == pytest.approx(PEAK * part, rel=1e-12)
        assert cosine[step] == pytest.approx(PEAK * math.sin(math.pi * part / 2) ** 2, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rise_and_fall_meet_without_a_jump(kind):
    """A hundred times finer, the largest change from one update to the next is a hundred times smaller."""

    def largest_jump(scale):
        lr = rates(num_steps=NUM_STEPS * scale, kind=kind, warmup_steps=WARMUP * scale, min_lr=LOW)
        return max(abs(a - b) for a, b in pairwise(lr))

    assert largest_jump(100) == pytest.approx(largest_jump(1) / 100, rel=0.02)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_without_warmup_the_first_update_has_the_peak(kind):
    assert rates(kind=kind)[0] == PEAK


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 1), (5, 5), (2, 1)])
def test_shortest_runs_reach_the_peak(kind, num_steps, warmup):
    """A run that is all rise ends at the peak."""
    assert max(rates(num_steps=num_steps, kind=kind, warmup_steps=warmup)) == PEAK


def test_a_run_shorter_than_its_warm_up_rises_all_the_way():
    """Update n of N has n / N of the peak (one_cycle: the same part of half a cosine); the last one has the peak."""
    for kind in KINDS:
        assert rates(num_steps=10, kind=kind, warmup_steps=100, min_lr=LOW) == [
            PEAK * ((1 - math.cos(math.pi * n / 10)) / 2 if kind == "one_cycle" else n / 10) for n in range(1, 10)
        ] + [PEAK]


@pytest.mark.parametrize(
    ("num_steps", "peak", "config", "names"),
    [
        (10, PEAK, {"warmup_steps": -1}, ("warmup_steps=-1",)),
        (0, PEAK, {}, ("num_steps=0",)),
        (10, PEAK, {"min_lr": 1.0}, ("min_lr=1.0", f"optimizer.lr={PEAK}")),
        (10, PEAK, {"min_lr": -1.0}, ("min_lr=-1.0",)),
        (10, math.nan, {}, ("optimizer.lr=nan",)),
        (10, PEAK, {"kind": "one_cycle"}, ("warmup_steps", "use about 3")),
        (10, PEAK, {"kind": "linear"}, ("'linear'", "cosine")),
    ],
)
def test_impossible_schedules_are_refused(num_steps, peak, config, names):
    """The message has the numbers and the names of the settings."""
    with pytest.raises(ConfigError) as raised:
        check_schedule(num_steps, peak, ScheduleConfig(**config))
    assert all(name in str(raised.value) for name in names)
    with pytest.raises(ConfigError):
        learning_rate(0, num_steps, peak, ScheduleConfig(**config))


def test_negative_step_is_refused():
    with pytest.raises(ConfigError, match="first update is step 0"):
        learning_rate(-1, NUM_STEPS, PEAK, ScheduleConfig())
