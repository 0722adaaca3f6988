"""500 steps on two ranks with validation, sampling and saves: memory does not grow, and no resource stays open."""

import os
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any

import pytest

from tests.integration import actions
from tests.integration.runs import SMALL_PACKS, overrides
from tests.support.ranks import Job, run_jobs
from tests.support.usage import Usage, read_usage, settled, usage_noted
from tests.unit.energon_data.small_data import clips, write_dataset

pytestmark = pytest.mark.slow

STEPS, WARM, EVERY, SHORT = 500, 100, 10, 20
MOST_MIB_PER_STEP = 0.1
MODES = {"synchronous": False, "asynchronous": True}
SETTINGS: dict[str, Any] = {
    **SMALL_PACKS,
    "data__validation_samples": 4,
    "model__in_channels": 2,
    "model__num_classes": 10,
    "model__context_size": 3,
    "training__global_batch_size": 2,
    "training__log_interval": 1,
    "training__validation_interval": 20,
    "training__sample_interval": 50,
    "sampling__num_steps": 2,
    "checkpoint__interval": 10,
    "checkpoint__keep_best": 1,
    "logging__tensorboard": True,
}


def soaked(run_dir: Path, data: Path, steps: int, *, is_async: bool) -> Usage:
    """Train, and return the resources that this process uses afterwards."""
    settings = {**SETTINGS, "data__path": data, "training__num_steps": steps, "checkpoint__async_save": is_async}
    noted = partial(usage_noted, run_dir.with_name(f"{run_dir.name}_{os.environ['RANK']}.jsonl"), EVERY)
    ended = actions.train(["--yes", "--factory", "tiny_dit", *overrides(run_dir, **settings)], noted)
    assert ended.code == 0, ended.err
    return settled()


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Any]:
    sizes = [(1, 4, 4), (2, 4, 4), (1, 6, 8)]
    splits = {"train": clips(75, sizes=sizes), "val": clips(21, sizes=sizes, seed=1)}
    data = write_dataset(folder / "data", splits)
    jobs = {}
    for mode, is_async in MODES.items():
        for name, steps in ((f"{mode} before", SHORT), (mode, STEPS)):  # the short run imports all modules
            case = {"run_dir": folder / name, "data": data, "steps": steps, "is_async": is_async}
            jobs[name] = Job(soaked, case, 2)
    return run_jobs(folder / "world", jobs, timeout_s=900)


CASES = [(mode, rank) for mode in MODES for rank in (0, 1)]


@pytest.mark.parametrize(("mode", "rank"), CASES)
def test_memory_does_not_grow(ended: dict[str, Any], folder: Path, mode: str, rank: int) -> None:
    found = read_usage(folder / f"{mode}_{rank}.jsonl")
    assert max(found) == STEPS
    steps = [step for step in found if step >= WARM]
    slope = linear_regression(steps, [found[step]["memory_mib"] for step in steps]).slope
    print(f"{mode} rank {rank}: {slope:.4f} MiB a step, {found[WARM]['memory_mib']:.0f} MiB at step {WARM}")
    assert slope < MOST_MIB_PER_STEP


@pytest.mark.parametrize(("mode", "rank"), CASES)
def test_steps_leave_no_file_or_thread_open(ended: dict[str, Any], folder: Path, mode: str, rank: int) -> None:
    """The last step has no threads, files or children that step 100 did not have."""
    found = read_usage(folder / f"{mode}_{rank}.jsonl")
    first, last = found[WARM], found[STEPS]
    assert Counter(last["threads"]) - Counter(first["threads"]) == Counter()
    assert last["num_threads"] <= first["num_threads"]
    assert Counter(last["files"]) - Counter(first["files"]) == Counter()
    assert Counter(last["children"]) - Counter(first["children"]) == Counter()


@pytest.mark.parametrize(("mode", "rank"), CASES)
def test_a_run_leaves_no_file_or_thread_open(ended: dict[str, Any], mode: str, rank: int) -> None:
    before, after = ended[f"{mode} before"][rank], ended[mode][rank]
    assert Counter(after.threads) - Counter(before.threads) == Counter()
    assert after.num_threads <= before.num_threads
    assert Counter(after.files) - Counter(before.files) == Counter()
    assert Counter(after.children) - Counter(before.children) == Counter()
