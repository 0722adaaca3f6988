"""Steps whose passes are replayed have the numbers of eager steps, to the bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.step import build_parser, config_of
from dit import philox
from dit.backends.process_groups import ProcessGroups
from dit.errors import BatchError
from dit.step.cuda_graph import WARM_UP, Compute, GraphedSchedule
from dit.step.train_step import Logs, StepObserver, train_step
from dit.training.pretrain import Run
from tests.support.replays import record

STEPS = WARM_UP + 5


class Records:
    """Records passes, and counts records and replays."""

    recorded = replayed = 0

    def __call__(self, compute: Compute) -> tuple[Logs, Callable[[], None]]:
        self.recorded += 1
        logs, run = record(compute)

        def replay() -> None:
            self.replayed += 1
            run()

        return logs, replay


def steps(folder: Any, groups: ProcessGroups, words: list[str], records: Records | None) -> list[Any]:
    """Return loss, gradient norm, and a sum of each weight for each step of a tiny run."""
    arguments = ["training.global_batch_size=4", "training.micro_batch_size=2", "data.num_streams=1", *words[1:]]
    config = config_of(build_parser().parse_args(["--factory", words[0], *arguments]), str(folder))
    run = Run(config, *config.check_here(), groups, quiet=True)
    functions = run.functions if records is None else replace(run.functions, schedule=GraphedSchedule(records))
    numbers = []
    for _ in range(STEPS):
        run.batches.begin_step()
        step = train_step(run.state, run.batches, functions, StepObserver())
        numbers.append((step.loss, step.grad_norm, *(shard.main.double().sum().item() for shard in run.state.shards)))
    run.close()
    return numbers


@pytest.fixture
def words_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute random words by operations of torch, as on a GPU."""
    monkeypatch.setattr(philox, "ten_rounds", philox._rounds)


@pytest.mark.usefixtures("words_on_device")
@pytest.mark.parametrize("recipe", ["tiny_dit", "tiny_ldm_unet"])
def test_replayed_steps_have_the_numbers_of_eager_steps(recipe: str, tmp_path: Any, one_rank_world: ProcessGroups) -> None:
    """Every step has other samples, noise and weights, so a number that a replay does not read anew would be seen."""
    records = Records()
    eager = steps(tmp_path / "eager", one_rank_world, [recipe, "data.text_tokens=1"], None)
    assert steps(tmp_path / "replayed", one_rank_world, [recipe, "data.text_tokens=1"], records) == eager
    assert (records.recorded, records.replayed) == (1, STEPS - WARM_UP)
    assert len({loss for loss, *_ in eager}) == STEPS
