"""Steps that are computed twice: a machine fault is detected, its rank is named, and no wrong number is trained on."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injections import injected
from tests.faults.test_numbers import arguments
from tests.integration import actions
from tests.integration.runs import assert_same_bits, checkpoint, incidents, outcome, read_tensors, scalars
from tests.support.ranks import Job, rows, run_jobs, selected

STEPS, DUE = 5, 4
TINY = 1 + 2.0**-20  # changes the last bits of a number, which no loss or norm would show
FAULTS: dict[str, dict[str, Any]] = {
    "forward": {"place": "forward", "layer": "layers.1.mlp"},
    "backward": {"place": "backward", "layer": "layers.1.mlp"},
    "weight": {"place": "weight", "layer": "layers.1.mlp.linear_fc1"},
}
TIMES: dict[str, tuple[tuple[float, int], ...]] = {
    "first": ((TINY, 1),),
    "second": ((2.0, 1), (0.5, 2)),  # both factors act in the first computation and cancel
    "all": ((TINY, 1), (1.01, 2)),
}
"""Factors, and how many times each acts: one of three computations is wrong, or all three differ."""

ROW = ("layout", "fault", "times")
LAYOUTS = ("dp2", "overlap", "dist_opt", "fsdp", "fsdp_grads", "experts", "ep2", "tp2", "pp2")
ALONE = ("dp2", "overlap", "dist_opt", "fsdp", "fsdp_grads", "experts")
"""Layouts in which no rank uses another rank's results before gradients are summed."""
CASES = [
    *((layout, "forward", "first") for layout in LAYOUTS),
    *((layout, "weight", "first") for layout in ("overlap", "fsdp", "fsdp_grads", "tp2")),
    *((layout, "backward", "first") for layout in ("dp2", "fsdp", "pp2")),
    *(("dp2", "forward", times) for times in ("second", "all")),
]


def is_quick(layout: str, fault: str, times: str) -> bool:
    return (layout, fault) == ("dp2", "forward") and times != "second"


def words(folder: Path, layout: str, interval: int) -> list[str]:
    settings = {"training__deterministic": True, "training__recheck_interval": interval, "training__num_steps": STEPS}
    return arguments(folder, layout, **settings)


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """Run the selected cases, and for each layout a run without repeated steps and one that repeats all."""
    jobs: dict[str, Job] = {}
    for layout, fault, times in sorted(selected(request, ROW)):
        for name, interval in ((f"{layout} once", 0), (f"{layout} twice", 1)):
            jobs[name] = Job(actions.train, {"arguments": words(folder / name, layout, interval)}, ranks=2)
        name = f"{layout} {fault} {times}"
        wrong = [{"step": DUE, "rank": 1, **FAULTS[fault], "factor": f, "times": n} for f, n in TIMES[times]]
        case = {"arguments": words(folder / name, layout, DUE), "fault": partial(injected, *wrong)}
        jobs[name] = Job(actions.train, case, ranks=2)
    return run_jobs(folder / "world", jobs)


@pytest.mark.parametrize(ROW, rows(CASES, is_quick))
def test_a_single_fault_is_detected_and_changes_no_number(
    ended: dict[str, Any], folder: Path, layout: str, fault: str, times: str
) -> None:
    name, undisturbed = f"{layout} {fault} {times}", folder / f"{layout} once"
    (incident,) = incidents(folder / name)
    assert (incident["incident"], incident["step"]) == ("machine_fault", DUE)
    ranks = incident["details"]["ranks"]
    assert 1 in ranks
    assert ranks == [1] or layout not in ALONE
    if times == "all":
        assert [run.code for run in ended[name]] == [17, 17]
        record = outcome(folder / name)
        assert (record["reason"], record["step"]) == ("machine", DUE - 1)
        assert f"step {DUE}: two computations from the same data and weights" in record["error"]
        assert "and a third one neither of them, on rank 1. No update" in record["error"]
        assert incident["details"]["action"] == "stop"
        return
    assert [run.code for run in ended[name]] == [0, 0], ended[name][0].err
    assert incident["details"]["action"] == "repeat"
    assert_same_bits(*(read_tensors(checkpoint(run, STEPS)) for run in (folder / name, undisturbed)))
    assert scalars(folder / name, "loss") == scalars(undisturbed, "loss")


@pytest.mark.parametrize(ROW, rows(CASES, is_quick))
def test_a_recomputed_step_is_counted_once(
    ended: dict[str, Any], folder: Path, layout: str, fault: str, times: str
) -> None:
    """Without a fault: no incident, the same bits, and the same numbers in the log."""
    once, twice = (folder / f"{layout} {name}" for name in ("once", "twice"))
    for name in ("once", "twice"):
        assert [run.code for run in ended[f"{layout} {name}"]] == [0, 0]
        assert incidents(folder / f"{layout} {name}") == []
    assert_same_bits(*(read_tensors(checkpoint(run, STEPS)) for run in (once, twice)))
    for value in ("loss", "grad_norm", "consumed_samples", "experts/layer_1/max_load", "experts/layer_1/per_token"):
        found, expected = scalars(twice, value), scalars(once, value)
        assert found == expected
        assert bool(found) == (layout in ("experts", "ep2") or not value.startswith("experts"))
