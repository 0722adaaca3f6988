"""A step of a run depends only on its number and its weights, not on ranks, resumes or earlier validations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dit.backends import process_groups
from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.records import METADATA_FILE
from dit.parallel.dims import ParallelConfig
from dit.training.pretrain import Run
from dit.verify.ranks import run_world
from tests.support.tiny_runs import tiny_run

pytestmark = pytest.mark.usefixtures("one_rank_world")


@pytest.fixture
def run(tmp_path: Path, one_rank_world: ProcessGroups) -> Run:
    return tiny_run(tmp_path, one_rank_world)


def test_the_learning_rate_of_a_step_is_the_same_on_any_number_of_ranks(run: Run) -> None:
    rates = [run.rates(step) for step in range(4)]
    assert rates[0] != rates[1]
    assert rates[0][0] > 0  # the first update has an effect
    run.groups = replace(run.groups, world_size=4, dp_size=4)
    assert [run.rates(step) for step in range(4)] == rates


def test_a_run_that_starts_at_a_later_step_draws_the_noise_of_that_step(
    run: Run, tmp_path: Path, one_rank_world: ProcessGroups
) -> None:
    batch = run.batches.peek()

    def loss(run: Run, step: int) -> float:
        prediction_TC, loss_function = run.forward_step(step)(iter([batch]), run.state.wrapped[0])
        return float(loss_function(prediction_TC)[0])

    losses = [loss(run, step) for step in range(4)]
    assert losses[0] != losses[3]
    assert loss(tiny_run(tmp_path, one_rank_world), 3) == losses[3]


def test_training_continues_from_its_own_weights_after_the_average_was_used(run: Run) -> None:
    run.step(torch.zeros(2))
    run.step(torch.zeros(2))
    before = [parameter.detach().clone() for parameter in run.state.wrapped[0].parameters()]
    with run.state.averaged():
        used = [parameter.detach().clone() for parameter in run.state.wrapped[0].parameters()]
    after = list(run.state.wrapped[0].parameters())
    assert not all(map(torch.equal, before, used))
    assert all(map(torch.equal, before, after))


SHAPES = ['data.shapes=["1x8x8","1x8x8","1x16x8","1x8x16"]', "training.micro_batch_size=1"]
SHAPES += ["training.global_batch_size=2", "data.num_streams=2", "training.ema_decay=null"]


def saved_sizes(case: dict[str, Any]) -> list[list[Any]]:
    """Save two steps and return each rank's largest sample before and after, and the saved size."""
    folder = Path(case["folder"])
    groups = case.get("groups") or process_groups.initialize(ParallelConfig())
    run = tiny_run(folder, groups, *SHAPES)
    for _ in range(2):
        run.step(torch.zeros(2))
    before = run.batches.latent_size()
    run.save()
    run.saves.finish()
    [metadata] = folder.glob(f"checkpoints/*/{METADATA_FILE}")
    sizes = [before, run.batches.latent_size(), tuple(json.loads(metadata.read_text())["latent_size"])]
    run.close()
    return process_groups.gather_objects(sizes)


def test_the_saved_size_is_that_of_the_largest_sample_of_all_ranks(
    tmp_path: Path, one_rank_world: ProcessGroups
) -> None:
    """Of several sizes with equally many tokens, it is the largest along time, then height."""
    [[_, size, _]] = saved_sizes({"folder": tmp_path / "one", "groups": one_rank_world})
    case = {"task": f"{__name__}:saved_sizes", "folder": tmp_path / "two"}
    [ranks] = run_world(2, [case], tmp_path / "ranks", timeout_s=120)
    assert {tuple(before) for before, *_ in ranks} > {size}
    assert [sizes[1:] for sizes in ranks] == [[size, size]] * 2
