"""Runs of the recipe `tiny_dit` in this process, on one rank."""

from pathlib import Path

import torch

from benchmarks.step import build_parser, config_of
from dit.backends.process_groups import ProcessGroups
from dit.run_config import RunConfig
from dit.training.pretrain import Run

ONE_STREAM = ("training.global_batch_size=4", "training.micro_batch_size=4", "data.num_streams=1")


def tiny_config(folder: Path, *settings: str) -> RunConfig:
    """Return the recipe with `key.path=value` settings."""
    return config_of(build_parser().parse_args(["--factory", "tiny_dit", *settings]), str(folder))


def tiny_run(folder: Path, groups: ProcessGroups, *settings: str) -> Run:
    config = tiny_config(folder, *settings)
    return Run(config, *config.check_here(), groups, quiet=True)


def finish(run: Run, steps: int = 1) -> None:
    """Train some steps, save, and close the run."""
    for _ in range(steps):
        run.step(torch.zeros(2))
    run.save()
    run.close()
