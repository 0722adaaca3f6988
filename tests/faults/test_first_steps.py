"""Reports about a run's first steps: no problem, parameters without gradient, replicas or ranks with wrong samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fiddle as fdl
import pytest
import torch.distributed as dist

from dit.parallel.build import parameter_shapes
from dit.training.pretrain import Run
from energon_data.mock import MockData
from recipes.tiny import tiny_dit_pack
from tests.faults import injections
from tests.faults.test_numbers import EXPERTS, arguments
from tests.integration import actions
from tests.integration.runs import incidents
from tests.support.faults import together
from tests.support.ranks import Job, run_jobs

DEAD = "layers.1.mlp.linear_fc1.weight"
SHORT = {"training__num_steps": 5, "checkpoint__interval": 0}
BAD_STEP, LAST = (partial(injections.injected, {"step": step, "rank": None, "place": "data"}) for step in (2, 5))


def unplugged(run: Run) -> None:
    """Zero the gradient of one parameter on all ranks."""
    for chunk in run.state.chunks:
        for name, parameter in chunk.named_parameters():
            if name == DEAD:
                parameter.register_hook(lambda gradient: gradient * 0)


@contextmanager
def rank_1_reads_ahead() -> Iterator[None]:
    """Let rank 1 skip a micro-batch."""

    def read(run: Run) -> None:
        if dist.get_rank() == 1:
            next(run.state.stream)

    with injections.after_build(read):
        yield


@contextmanager
def all_read_as_replica_0() -> Iterator[None]:
    """Let all replicas read the stream of replica 0."""
    build = MockData.build_train

    def built(self: MockData, *args: Any, **named: Any) -> Any:
        return build(self, *args, **{**named, "dp_rank": 0})

    with mock.patch.object(MockData, "build_train", built):
        yield


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Any]:
    cases: dict[str, tuple[str, Any]] = {
        "dp2": ("dp2", None),
        "tp2": ("tp2", None),
        "pp2": ("pp2", None),
        "fsdp": ("fsdp", None),
        "dead": ("dp2", partial(injections.after_build, unplugged)),
        "dead on a stage": ("pp2", partial(injections.after_build, unplugged)),
        "dead and a step left out": ("dp2", partial(together, partial(injections.after_build, unplugged), BAD_STEP)),
        "dead and the last step left out": ("dp2", partial(together, partial(injections.after_build, unplugged), LAST)),
        "ep2": ("ep2", None),
        "apart": ("tp2", rank_1_reads_ahead),
        "same": ("dp2", all_read_as_replica_0),
    }
    skip = {"training__on_bad_numbers": "skip"}
    jobs = {
        name: Job(actions.train, {"arguments": arguments(folder / name, layout, **SHORT, **skip), "fault": fault}, 2)
        for name, (layout, fault) in cases.items()
    }
    return run_jobs(folder / "world", jobs)


def line(ended: dict[str, Any], name: str) -> str:
    """Return the only line of rank 0 about the first steps."""
    (found,) = [text for text in ended[name][0].out.splitlines() if text.startswith("first steps: ")]
    return found


@pytest.mark.slow
def test_a_correct_run_prints_one_line(ended: dict[str, Any]) -> None:
    """It appears in the third step, because two layers in a row start as zeros; all layouts have the same total."""
    said = {name: line(ended, name) for name in ("dp2", "tp2", "pp2", "fsdp")}
    total = said["dp2"].split()[3]
    assert int(total) > 20
    all_learn = f"first steps: all {total} parameters have a gradient; "
    assert said["dp2"] == said["fsdp"] == f"{all_learn}2 replicas read different samples"
    assert said["tp2"] == said["pp2"] == f"{all_learn}the 2 ranks of the replica read the same"


@pytest.mark.slow
def test_all_experts_count(ended: dict[str, Any]) -> None:
    """The total has the experts of all expert-parallel ranks."""
    recipe = tiny_dit_pack()
    for name, value in EXPERTS.items():
        setattr(recipe.model, name.removeprefix("model__"), value)
    assert line(ended, "ep2").split()[3] == str(len(parameter_shapes(fdl.build(recipe.model))))


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["", " and a step left out", " and the last step left out", " on a stage"])
def test_a_parameter_without_a_gradient_is_named(ended: dict[str, Any], folder: Path, left_out: str) -> None:
    """The report comes at the end of a short run, even if a step was skipped."""
    name = f"dead{left_out}"
    assert [run.code for run in ended[name]] == [0, 0]
    assert f"had no gradient in {4 if 'left out' in name else 5} updates: {DEAD}; " in line(ended, name)
    (incident,) = [r for r in incidents(folder / name) if r["incident"] != "not_finite"]
    assert (incident["incident"], incident["details"]["parameters"]) == ("no_gradient", [DEAD])


@pytest.mark.slow
def test_ranks_of_a_replica_that_read_different_samples_end_the_run(ended: dict[str, Any]) -> None:
    assert [run.code for run in ended["apart"]] == [3, 3]
    assert "ranks 0 and 1 are parts of replica 0 and read different samples" in ended["apart"][0].err


@pytest.mark.slow
def test_replicas_that_read_the_same_samples_are_named(ended: dict[str, Any], folder: Path) -> None:
    assert "first steps: replicas 0 and 1 read the same samples in step 1" in ended["same"][0].out
    (incident,) = incidents(folder / "same")
    assert (incident["incident"], incident["details"]["replicas"]) == ("same_samples", [0, 1])
