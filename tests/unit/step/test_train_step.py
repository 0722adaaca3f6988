"""The order of calls in an optimizer step, and steps without an update."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.step.schedule import Logs
from dit.step.train_step import Action, Compute, Part, Step, StepObserver, train_step
from dit.training.pretrain import Run
from tests.support.tiny_runs import tiny_run


class Recorder(StepObserver):
    """Records the calls of a step.

    Args:
        action: result of `judge`.
        times: number of gradient computations, on the same micro-batches.
    """

    def __init__(self, action: Action = "update", times: int = 1) -> None:
        self.action, self.times = action, times
        self.calls: list[str] = []

    def enter(self, part: Part) -> None:
        self.calls.append(part)

    def compute(self, compute: Compute, batches: Iterator[PackedBatch]) -> Logs:
        self.calls.append("compute")
        micro_batches = list(batches)
        return [compute(iter(micro_batches)) for _ in range(self.times)][-1]

    def judge(self, step: Step) -> Action:
        self.calls.append("judge")
        return self.action

    def discard(self, step: Step) -> None:
        self.calls.append("discard")


def after_steps(folder: Any, groups: ProcessGroups, *observers: StepObserver) -> tuple[Run, list[Step]]:
    """Return a run of a tiny model after one step with each observer."""
    words = "training.global_batch_size=2", "training.micro_batch_size=1", "data.num_streams=1"
    run = tiny_run(folder, groups, *words)
    steps = []
    for observer in observers:
        batches = iter([next(run.batches) for _ in range(2)])
        steps.append(train_step(run.state, batches, run.functions, observer))
    run.close()
    return run, steps


def weights(run: Run) -> torch.Tensor:
    return torch.cat([shard.main.flatten() for shard in run.state.shards])


def test_the_update_is_the_last_part_of_a_step(tmp_path: Any, one_rank_world: ProcessGroups) -> None:
    recorder = Recorder()
    run, (step,) = after_steps(tmp_path, one_rank_world, recorder)
    parts = ["forward and backward", "compute", "numbers", "judge", "update", "end"]
    assert recorder.calls == parts
    assert (run.state.step, step.number, step.action) == (1, 1, "update")
    terms, tokens = step.sums
    assert step.loss == pytest.approx(float(terms / tokens))


@pytest.mark.parametrize(("action", "counted"), [("skip", 1), ("rewind", 0)])
def test_a_step_without_an_update_changes_no_weight(
    tmp_path: Any, one_rank_world: ProcessGroups, action: Action, counted: int
) -> None:
    """A skipped step is counted; a rewound one is not."""
    recorder = Recorder(action)
    run, _ = after_steps(tmp_path / "one", one_rank_world, recorder)
    unchanged, _ = after_steps(tmp_path / "none", one_rank_world)
    assert recorder.calls[-3:] == ["judge", "discard", "end"]
    assert "update" not in recorder.calls
    assert run.state.step == counted
    assert torch.equal(weights(run), weights(unchanged))


def test_gradients_start_at_zero_in_every_computation(tmp_path: Any, one_rank_world: ProcessGroups) -> None:
    """After two computations in a step, and after a skipped step, the gradients are those of one computation."""
    once, (first,) = after_steps(tmp_path / "once", one_rank_world, Recorder())
    twice, (second,) = after_steps(tmp_path / "twice", one_rank_world, Recorder(times=2))
    assert second.grad_norm == first.grad_norm > 0
    assert torch.equal(weights(once), weights(twice))
    _, (_, third) = after_steps(tmp_path / "skip", one_rank_world, Recorder("skip"), Recorder())
    _, (_, fourth) = after_steps(tmp_path / "skip twice", one_rank_world, Recorder("skip", times=2), Recorder())
    assert third.grad_norm == fourth.grad_norm
