"""The test for bad steps against the formula by hand, and the history of applied steps."""

import json
import math

import pytest

from dit.step_checks import spikes
from dit.step_checks.bad_steps import suspicion
from dit.step_checks.spikes import NumberGuard, spike_limit

HISTORY = [float(value) for value in range(1, 18)]  # median 9, median absolute deviation 4


def guard(threshold: float | None = 10.0) -> NumberGuard:
    return NumberGuard(threshold, max_bad=2)


def fed(judge: NumberGuard, count: int = 16) -> NumberGuard:
    for step in range(1, count + 1):
        assert judge.judge(step, 1.0 + step % 3, 5.0) is None
    return judge


def test_the_limit_is_the_median_plus_robust_deviations():
    assert spike_limit(HISTORY, 10.0) == pytest.approx(9 + 10 * 1.4826 * 4)
    assert spike_limit(HISTORY[:15], 10.0) is None
    assert spike_limit([2.0] * 16, 10.0) == pytest.approx(2 + 10 * 0.02)
    assert spike_limit([-2.0] * 16, 10.0) == pytest.approx(-2 + 10 * 0.02)


def test_outliers_in_the_history_do_not_move_the_limit():
    assert spike_limit([*HISTORY[:-1], 1e30], 10.0) == spike_limit(HISTORY, 10.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_number_that_is_not_finite_is_bad_from_the_first_step_and_without_a_threshold(name, bad):
    found = guard(None).judge(1, **{"loss": 1.0, "grad_norm": 1.0, name: bad})
    assert (found.kind, found.step) == ("not_finite", 1)


@pytest.mark.parametrize(("loss", "grad_norm", "named"), [(1e3, 5.0, "loss=1000"), (2.0, 6.0, "grad_norm=6")])
def test_a_spike_of_loss_or_norm_is_bad_and_the_message_has_the_numbers(loss, grad_norm, named):
    found = fed(guard()).judge(17, loss, grad_norm)
    assert found.kind == "spike"
    assert named in found.reason
    assert fed(guard(None)).judge(17, loss, grad_norm) is None
    assert fed(guard(), 15).judge(16, loss, grad_norm) is None, "the history is too short"


def test_only_applied_steps_enter_the_history_of_the_window():
    """A thousand spikes do not become normal; low values are no spikes; old values leave the history."""
    judge = fed(guard())
    for step in range(17, 1017):
        assert judge.judge(step, 1e3, 5.0) is not None
    assert judge.judge(1017, -1e3, 0.0) is None
    assert judge.judge(1018, 1.0, 5.0) is None
    for step in range(spikes.HISTORY):
        assert judge.judge(2000 + step, 1.0, 5.0) is None
    assert judge.judge(3000, 1.2, 5.0) is not None, "of the window all are 1"


def test_too_many_bad_steps_within_the_window_are_an_error():
    judge = guard()
    for step, many in [(1, False), (50, False), (110, False), (150, False), (160, True), (300, False)]:
        judge.note_bad(step)
        assert judge.too_many() is many, step


def test_the_state_survives_json_bitwise_unchanged():
    judge = fed(guard())
    judge.judge(17, 1.1, 0.1 + 0.2)
    judge.note_bad(18)
    other = guard()
    other.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    assert other.state_dict() == judge.state_dict()
    other.load_state_dict({})
    assert other.state_dict() == guard().state_dict()


def test_the_report_of_a_bad_step_names_ranks_and_first_samples():
    keys = [f"clip-{i}" for i in range(20)]
    said = suspicion({3: keys, 5: keys})  # two ranks that share a model
    assert "rank 3, 5 is" in said
    assert "clip-7 and 12 more; look at these samples" in said
    assert said.count("clip-0,") == 1
    assert suspicion({}) == "Each rank's own loss is finite"
