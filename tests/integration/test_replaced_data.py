"""Data replaced under the path of a run: a resume refuses them, or reads them from the start if accepted."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dit.checkpoint.checkpointer import read_loader_state
from tests.integration import actions
from tests.integration.runs import checkpoint, letters, same
from tests.support.ranks import Job, call, run_jobs
from tests.unit.energon_data.small_data import npy, write_dataset

STOP, STEPS = 4, 6


def write(folder: Path, count: int, seed: int, held_out_seed: int = 0) -> None:
    """Write a data set of random latents, and delete an older one."""

    def samples(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any], dict[str, bytes]]]:
        rng = np.random.default_rng(seed)
        for i in range(count):
            yield f"s{i:02d}", {"label": i % 26}, {"latent.npy": npy(rng.standard_normal((1, 1, 8, 8), np.float32))}

    shutil.rmtree(folder, ignore_errors=True)
    write_dataset(folder, {"train": samples(count, seed), "val": samples(8, held_out_seed)}, per_shard=32)


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Any]:
    data = folder / "data"

    def train(run: str, steps: int, **settings: Any) -> Job:
        settings = {"training__num_steps": STEPS, "training__stop_at_step": steps, **settings}
        return call(actions.train, *letters(data, folder / run, **settings))

    def written(*arguments: int) -> Job:
        return Job(write, dict(zip(("folder", "count", "seed", "held_out_seed"), (data, *arguments))))

    jobs = {
        "write": written(80, 0),
        "begin": train("run", STOP),
        "write fewer": written(30, 0),
        "fewer": train("run", STEPS),
        "write noise": written(80, 1, 1),
        "noise": train("run", STEPS),
        "accepted": train("run", STEPS, checkpoint__accept_changes='["data.path"]'),
        "fresh": train("fresh", STEPS - STOP),
        "goes on": train("run", STEPS, checkpoint__accept_changes='["data.path"]'),
        "write held-out": written(80, 1, 2),
        "held-out": train("run", STEPS),
    }
    return run_jobs(folder / "world", jobs)


@pytest.mark.parametrize(("name", "now"), [("fewer", "30 samples in 1 shard"), ("noise", "80 samples in 3 shards")])
def test_other_data_under_the_same_path_are_refused(ended: dict[str, Any], folder: Path, name: str, now: str) -> None:
    assert ended["begin"].code == 75, ended["begin"].err
    assert ended[name].code == 2, ended[name].err
    error = ended[name].err
    assert f"data.path: {folder / 'data'} (train): 80 samples in 3 shards, digest " in error
    assert f" -> {now}, digest " in error
    assert "'checkpoint.accept_changes=[\"data.path\"]'" in error


def test_accepted_data_are_read_from_their_beginning_once(ended: dict[str, Any], folder: Path) -> None:
    assert (ended["accepted"].code, ended["fresh"].code) == (0, 75), ended["accepted"].err
    positions = [read_loader_state(checkpoint(folder / run, step)) for run, step in (("run", 6), ("fresh", 2))]
    assert same(*positions)
    assert ended["goes on"].code == 0
    log = (folder / "world" / "rank_0.log").read_text()
    assert log.count("the data start afresh") == 1


def test_other_held_out_data_are_reported(ended: dict[str, Any], folder: Path) -> None:
    assert ended["held-out"].code == 0, ended["held-out"].err
    log = (folder / "world" / "rank_0.log").read_text()
    assert f"changed since step 6: data.validation_split: {folder / 'data'} (val): 8 samples in 1 shard" in log
