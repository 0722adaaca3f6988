"""Learning rates: closed forms at certain updates, no jumps between phases, torch's one-cycle to the last digit."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from dit.errors import ConfigError
from dit.optimizer.schedules import WSD, Constant, Cosine, InverseSqrt, Linear, Schedule, TorchOneCycle, WarmUp

PEAK, LOW = 3e-4, 1e-5
NUM_STEPS, WARMUP, DECAY = 200, 40, 60
FALLING: dict[str, WarmUp] = {
    "cosine": Cosine(warmup_steps=WARMUP, min_lr=LOW),
    "linear": Linear(warmup_steps=WARMUP, min_lr=LOW),
    "wsd": WSD(warmup_steps=WARMUP, min_lr=LOW, decay_steps=DECAY),
    "wsd_root": WSD(warmup_steps=WARMUP, min_lr=LOW, decay_steps=DECAY, decay="one_minus_sqrt"),
}
RISING: dict[str, WarmUp] = {
    **FALLING,
    "constant": Constant(warmup_steps=WARMUP),
    "inverse_sqrt": InverseSqrt(warmup_steps=WARMUP, reference_steps=WARMUP),
}
every_rising = pytest.mark.parametrize("schedule", RISING.values(), ids=RISING)


def rates(schedule: Schedule, num_steps: int = NUM_STEPS) -> list[float]:
    return [schedule.rate(update, num_steps, PEAK) for update in range(1, num_steps + 1)]


@every_rising
def test_peak_is_at_the_end_of_the_rise_and_only_there(schedule):
    """The W-th update has exactly the peak rate; earlier ones are smaller, later ones not larger."""
    lr = rates(schedule)
    assert lr[WARMUP - 1] == PEAK
    assert all(a < b for a, b in pairwise(lr[:WARMUP]))
    assert lr[0] > 0  # the first update has an effect
    stable = NUM_STEPS - DECAY if isinstance(schedule, WSD) else WARMUP
    if isinstance(schedule, Constant):
        stable = NUM_STEPS
    assert set(lr[WARMUP - 1 : stable]) == {PEAK}
    assert all(a > b for a, b in pairwise(lr[stable - 1 :]))


@pytest.mark.parametrize("schedule", FALLING.values(), ids=FALLING)
def test_the_last_update_has_the_lowest_rate(schedule):
    """The fall reaches `min_lr` in the last step of the run, and the rate stays there."""
    assert schedule.rate(NUM_STEPS, NUM_STEPS, PEAK) == pytest.approx(LOW, rel=1e-12)
    assert schedule.rate(10 * NUM_STEPS, NUM_STEPS, PEAK) == pytest.approx(LOW, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        (FALLING["cosine"], lambda n: LOW + (PEAK - LOW) * math.cos(math.pi / 2 * (n - 40) / 160) ** 2),
        (FALLING["linear"], lambda n: (PEAK * (200 - n) + LOW * (n - 40)) / 160),
        (FALLING["wsd"], lambda n: PEAK if n <= 140 else (PEAK * (200 - n) + LOW * (n - 140)) / 60),
        (FALLING["wsd_root"], lambda n: PEAK if n <= 140 else PEAK - (PEAK - LOW) * ((n - 140) / 60) ** 0.5),
        (RISING["constant"], lambda n: PEAK),
        (RISING["inverse_sqrt"], lambda n: PEAK * (40 / n) ** 0.5),
    ],
)
def test_falls_follow_their_closed_forms(schedule, formula):
    """Each follows the formula of its paper, from the peak at update 40 to update 200."""
    for update in (40, 41, 80, 120, 140, 141, 155, 170, 199, 200):
        expected = formula(update)
        assert schedule.rate(update, NUM_STEPS, PEAK) == pytest.approx(expected, rel=1e-12), update


@every_rising
def test_rises_follow_their_closed_forms(schedule):
    for update, lr in enumerate(rates(schedule)[:WARMUP], start=1):
        assert lr == pytest.approx(PEAK * update / WARMUP, rel=1e-12)


@every_rising
def test_rise_and_fall_meet_without_a_jump(schedule):
    """With a hundred times more steps, the largest change between updates is 100 times smaller (the root: 10 times)."""

    def largest_jump(scale):
        lengths = {name: scale * n for name, n in vars(schedule).items() if name.endswith("_steps")}
        lr = rates(replace(schedule, **lengths), NUM_STEPS * scale)
        return max(abs(a - b) for a, b in pairwise(lr))

    # The root is infinitely steep at the start of the fall.
    finer = 10 if isinstance(schedule, WSD) and schedule.decay == "one_minus_sqrt" else 100
    assert largest_jump(100) == pytest.approx(largest_jump(1) / finer, rel=0.02)


@every_rising
def test_without_warmup_the_first_update_has_the_peak(schedule):
    assert rates(replace(schedule, warmup_steps=0))[0] == PEAK


@every_rising
@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 1), (5, 5), (2, 1)])
def test_shortest_runs_reach_the_peak(schedule, num_steps, warmup):
    """A run that consists of warm-up ends at the peak."""
    assert max(rates(replace(schedule, warmup_steps=warmup), num_steps)) == PEAK


@every_rising
def test_a_run_shorter_than_its_warm_up_rises_all_the_way(schedule):
    """Update n of N has n / N of the peak rate."""
    long = replace(schedule, warmup_steps=100)
    assert rates(long, 10) == [*(PEAK * (n / 10) for n in range(1, 10)), PEAK]
    assert long.adapted(10)[0] == "schedule.warmup_steps=100 is too long: the rate rises for 10 steps"
    assert not schedule.adapted(NUM_STEPS)


def test_a_run_without_room_for_the_decay_falls_from_the_end_of_the_rise():
    """40 of 70 updates are warm-up, so the decay takes 30 updates, not 60."""
    schedule = FALLING["wsd"]
    lr = rates(schedule, 70)
    assert lr[39] == PEAK
    assert lr[54] == pytest.approx((PEAK + LOW) / 2, rel=1e-12)
    assert lr[69] == pytest.approx(LOW, rel=1e-12)
    assert schedule.adapted(70) == ["schedule.decay_steps=60 is too long: the rate falls for 30 steps"]


def test_the_ramp_up_of_the_inverse_root_may_reach_into_its_fall():
    """EDM2 multiplies both: update 100 of a warm-up of 400 has a quarter of the peak, times a half from the fall."""
    schedule = InverseSqrt(warmup_steps=400, reference_steps=25)
    assert schedule.rate(100, 1000, PEAK) == pytest.approx(PEAK / 4 / 2, rel=1e-12)
    assert schedule.rate(400, 1000, PEAK) == pytest.approx(PEAK / 4, rel=1e-12)
    assert schedule.rate(900, 1000, PEAK) == pytest.approx(PEAK / 6, rel=1e-12)


@pytest.mark.parametrize(
    "changes", [{}, {"pct_start": 0.1, "div_factor": 10.0, "final_div_factor": 5.0}], ids=["default", "short rise"]
)
@pytest.mark.parametrize("num_steps", [7, 20, 1000])
def test_one_cycle_equals_the_schedule_of_torch(changes, num_steps):
    """Rate and beta1 of every update equal those of OneCycleLR with AdamW, to 1e-12."""
    schedule = type("Cycle", (TorchOneCycle,), changes)()
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0, betas=(0.9, 0.999))
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=num_steps, **changes)
    for step in range(num_steps):
        (group,) = optimizer.param_groups
        assert schedule.rate(step + 1, num_steps, PEAK) == pytest.approx(group["lr"], rel=1e-12, abs=0)
        assert schedule.momentum(step + 1, num_steps, 0.9) == pytest.approx(group["betas"][0], rel=1e-12, abs=0)
        optimizer.step()
        if step < num_steps - 1:  # torch raises an error for an update after the last one
            theirs.step()
    assert schedule.rate(num_steps + 6, num_steps, PEAK) == pytest.approx(group["lr"], rel=1e-12, abs=0)


def test_beta1_is_constant_unless_it_follows_the_schedule():
    for schedule in RISING.values():
        assert schedule.momentum(4, NUM_STEPS, 0.123) == 0.123


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        (Constant(warmup_steps=-1), ("schedule.warmup_steps=-1",)),
        (Cosine(min_lr=1.0), ("min_lr=1.0", f"optimizer.lr={PEAK}")),
        (Linear(min_lr=-1.0), ("schedule.min_lr=-1.0",)),
        (WSD(decay_steps=0), ("schedule.decay_steps=0",)),
        (WSD(decay="root"), ("schedule.decay='root'", "'one_minus_sqrt'")),  # type: ignore[arg-type]
        (InverseSqrt(reference_steps=0), ("schedule.reference_steps=0",)),
    ],
)
def test_impossible_schedules_are_refused(schedule, names):
    """The message has the numbers and the names of the settings."""
    with pytest.raises(ConfigError) as raised:
        schedule.check(PEAK)
    assert all(name in str(raised.value) for name in names)
