"""Recipes of a user's own module, whose training fails on request; named by `--factory tests.unit.launch...`."""

import functools
import os

import nemo_run as run
from torch.distributed.checkpoint.api import CheckpointException

from dit import errors
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig
from dit.settings import OptimizerConfig, TrainingConfig
from launch.overrides import parameters
from recipes.models import dit_s
from recipes.tiny import tiny_dit

OUTCOMES = {
    "config": errors.ConfigError("width 3 does not fit; use 4"),
    "data": errors.DataError("shard 7 is gone"),
    "not_finite": errors.NotFiniteError("the loss is not finite"),
    "checkpoint": errors.CheckpointError("no valid checkpoint"),
    "unexpected": RuntimeError("boom"),
    "no exception": CheckpointException("boom", {}),  # torch derives it from BaseException
    "peer lost": RuntimeError(f"Connection closed by peer \x1b[1m{'x' * 999}\nand a stack"),
    "preempted": SystemExit(errors.EXIT_PREEMPTED),
    "interrupted": KeyboardInterrupt(),
}


def pretrain(
    model: ModelConfig,
    objective: Objective,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
) -> None:
    """Raise the error that `training.run_dir` names; `RANK1:data` fails on rank 1 only."""
    where, _, outcome = training.run_dir.rpartition(":")
    if outcome in OUTCOMES and where in ("", f"RANK{os.environ.get('RANK')}"):
        raise OUTCOMES[outcome]
    print(f"trained {training.num_steps} steps")


@run.cli.factory(target=pretrain)
def ending(num_steps: int = 1) -> run.Partial:
    """Return a recipe that ends with the outcome in `training.run_dir`."""
    return run.Partial(
        pretrain,
        model=dit_s(),
        objective=run.Config(FlowMatching),
        optimizer=run.Config(OptimizerConfig),
        parallel=run.Config(ParallelConfig),
        training=run.Config(TrainingConfig, num_steps=num_steps),
    )


def wrapper(**parts: object) -> None:
    """Take the parts of the project's training function."""


def wrapped() -> "Unknown":  # type: ignore[name-defined]  # noqa: F821
    """Return tiny_dit for `wrapper`; a recipe may have annotations that are imported only for type checkers."""
    task = tiny_dit()
    return run.Partial(wrapper, **{name: getattr(task, name) for name in parameters(task)})


wrapped_partial = functools.partial(wrapped)


def not_a_recipe() -> int:
    """Return no configuration."""
    return 3
