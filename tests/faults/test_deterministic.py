"""Deterministic runs: torch's deterministic mode is on in every step, and two runs are equal to the bit."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock as patching

import pytest
import torch
from torch import Tensor

from dit.training.pretrain import Run
from tests.integration import actions
from tests.integration.runs import assert_same_bits, checkpoint, losses, mock, read_tensors
from tests.support.ranks import Job, run_jobs

STEPS = 4
RECIPES = ("tiny_dit", "tiny_stdit", "tiny_ecdit", "tiny_ldm_unet")
"""Packed and full attention, attention along frames, experts, convolutions."""
QUICK = RECIPES[:1]


@contextmanager
def modes_noted(file: Path) -> Iterator[None]:
    """Record before every step whether torch is in its deterministic mode."""
    original = Run.step

    def noted(self: Run, loss_sums: Tensor, **options: Any) -> float:
        with file.open("a") as out:
            out.write(json.dumps(torch.are_deterministic_algorithms_enabled()) + "\n")
        return original(self, loss_sums, **options)

    with patching.patch.object(Run, "step", noted):
        yield


def arguments(recipe: str, run_dir: Path, *, is_set: bool) -> list[str]:
    settings = {"training__num_steps": STEPS, "training__log_interval": 1, "training__deterministic": is_set}
    words = mock(run_dir, **settings, parallel__data_parallel="ddp")
    return [recipe if word == "tiny_dit" else word for word in words]


@pytest.fixture(scope="module")
def ended(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    asked = {item.callspec.params["recipe"] for item in request.session.items if item.path == request.path}
    jobs = {}
    for recipe in sorted(asked):
        for name, is_set in (("one", True), ("two", True), ("usual", False)):
            run_dir = folder / recipe / name
            run_dir.mkdir(parents=True)
            fault = partial(modes_noted, folder / recipe / f"{name}.jsonl")
            case = {"arguments": arguments(recipe, run_dir, is_set=is_set), "fault": fault}
            jobs[f"{recipe} {name}"] = Job(actions.train, case)
    return run_jobs(folder / "world", jobs)


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=() if r in QUICK else pytest.mark.slow) for r in RECIPES], ids=str
)
def test_two_runs_are_bitwise_equal(ended: dict[str, Any], folder: Path, recipe: str) -> None:
    for name in ("one", "two", "usual"):
        assert ended[f"{recipe} {name}"].code == 0, ended[f"{recipe} {name}"].err
        modes = [json.loads(line) for line in (folder / recipe / f"{name}.jsonl").read_text().splitlines()]
        assert modes == [name != "usual"] * STEPS
    one, two = (folder / recipe / name for name in ("one", "two"))
    assert losses(one) == losses(two)
    assert_same_bits(*(read_tensors(checkpoint(run, STEPS)) for run in (one, two)))
