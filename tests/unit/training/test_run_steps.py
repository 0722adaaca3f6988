"""A step of a run depends only on its number and its weights, not on ranks, resumes or earlier validations."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.step import build_parser, config_of
from dit.backends.process_groups import ProcessGroups
from dit.training.pretrain import Run

pytestmark = pytest.mark.usefixtures("one_rank_world")


def tiny_run(folder: Path, groups: ProcessGroups) -> Run:
    config = config_of(build_parser().parse_args(["--factory", "tiny_dit"]), str(folder))
    return Run(config, *config.check_here(), groups, quiet=True)


@pytest.fixture
def run(tmp_path: Path, one_rank_world: ProcessGroups) -> Run:
    return tiny_run(tmp_path, one_rank_world)


def test_the_learning_rate_of_a_step_is_the_same_on_any_number_of_ranks(run: Run) -> None:
    rates = [run.rates(step) for step in range(4)]
    assert rates[0] != rates[1]
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
