"""Kill -9 at random moments of a run on pictures and clips: every step consumes the samples of an undisturbed run."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dit.verify.ranks import FORKS, free_port
from energon_data.media_files import video_bytes
from energon_data.prepare.__main__ import main as prepare
from tests.integration import actions
from tests.integration.runs import SMALL_PACKS, loss_values, losses, overrides
from tests.support import faults

pytestmark = pytest.mark.slow

KILLS, GROWTH = 10, [2, 2, 4, 4]  # number of kills on one rank, then the number of ranks of each later attempt
NUM_STEPS, CLIPS_FROM = 60, 12
SEED = 9
ROUNDING = 1e-4  # relative, fp32: more ranks sum in another order, and updates amplify the difference
SETTINGS: dict[str, Any] = {
    **SMALL_PACKS,
    "data__flip": 0.5,
    "model__in_channels": 3,
    "model__patch_spatial": 4,
    "model__num_classes": "null",
    "model__context_size": "null",
    "training__num_steps": NUM_STEPS,
    "training__global_batch_size": 4,
    "checkpoint__interval": 3,
    "logging__tensorboard": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_media(tmp_path_factory.mktemp("kill"))


def prepare_media(folder: Path) -> Path:
    """Prepare 48 pictures of three sizes and 16 clips; the second half of the clips is longer."""
    rng = np.random.default_rng(0)

    def pixels(height: int, width: int) -> Image.Image:
        return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))

    for name in ("pictures", "films"):
        (folder / f"in_{name}").mkdir()
    for i in range(48):
        pixels(*((16, 16), (16, 32), (24, 16))[i % 3]).save(folder / "in_pictures" / f"p{i:02d}.png")
    for i in range(16):
        frames = [pixels(16, 16) for _ in range(2 + i // 8)]
        (folder / "in_films" / f"f{i:02d}.mp4").write_bytes(video_bytes(frames, 8.0))
    for kind, name in (("images", "pictures"), ("videos", "films")):
        words = ["--in", str(folder / f"in_{name}"), "--out", str(folder / name), "--processes", "1"]
        assert prepare([kind, *words, "--samples-per-shard", "10", "--validation", "0"]) == 0
    return folder


def arguments(folder: Path, run_dir: Path, **settings: Any) -> list[str]:
    """Return the arguments of a run on a blend that starts with pictures only."""
    blend = f"[{{path: {folder / 'pictures'}, weight: [1, 3]}}, {{path: {folder / 'films'}, weight: [0, 1]}}]"
    mixed = {"data__blend": blend, "data__blend_steps": [CLIPS_FROM]}
    return ["--yes", "--factory", "tiny_dit", *overrides(run_dir, **{**SETTINGS, **mixed, **settings})]


@dataclass(frozen=True)
class Attempt:
    """A started run: one process per rank, each with its workers in a separate session."""

    ranks: list[BaseProcess]

    def kill(self, *, workers: bool) -> None:
        """Kill all ranks at once, with their workers or without."""
        left = [child for rank in self.ranks for child in _children(rank)]
        for rank in self.ranks:
            (os.killpg if workers else os.kill)(rank.pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.join()
        deadline = time.monotonic() + 10
        while any(map(_runs, left)):
            assert time.monotonic() < deadline, "workers outlive their run"
            time.sleep(0.01)


def _children(process: BaseProcess) -> list[int]:
    """Return the process ids of the children of a process."""
    found: list[int] = []
    for thread in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, thread.read_text().split())
    return found


def _runs(process: int) -> bool:
    """Return whether a process is alive and not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _train(words: list[str], steps: Path, log: Path, world: dict[str, str]) -> None:
    """Train in this process, which was forked with all modules imported, in a new session."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ |= {"DIT_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **world}
    sys.exit(actions.train(words, partial(faults.samples_noted, steps)).code)


@contextmanager
def started(words: list[str], run_dir: Path, number: int, ranks: int = 1) -> Iterator[Attempt]:
    """Start an attempt at a run; kill all its processes at the end."""
    port, processes = str(free_port()), []
    for rank in range(ranks):
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
        files = (run_dir.with_name(f"{run_dir.name}_{kind}_{number}_{rank}") for kind in ("steps", "log"))
        processes.append(FORKS.Process(target=_train, args=(words, *files, world if ranks > 1 else {})))
    for process in processes:
        process.start()
    try:
        yield Attempt(processes)
    finally:
        for process in processes:
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def steps_of(run_dir: Path, number: int, rank: int = 0) -> dict[int, list[str]]:
    """Return the sample keys by step of one attempt on one rank, without a line that the kill cut off."""
    file = run_dir.with_name(f"{run_dir.name}_steps_{number}_{rank}")
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return {record["step"]: record["keys"] for record in map(json.loads, lines)}


def log_of(run_dir: Path, number: int, rank: int = 0) -> str:
    file = run_dir.with_name(f"{run_dir.name}_log_{number}_{rank}")
    return file.read_text()[-3000:] if file.exists() else ""


def kill_one(words: list[str], run_dir: Path, number: int, rng: random.Random, ranks: int = 1) -> None:
    """Start the run again, and kill it a few steps later at a random time within a step."""
    after, moment, workers = rng.randrange(3), 0.1 * rng.random(), rng.random() < 0.5
    with started(words, run_dir, number, ranks) as attempt:
        deadline = time.monotonic() + 120
        while len(steps_of(run_dir, number)) < after + 1:
            assert all(rank.is_alive() for rank in attempt.ranks), log_of(run_dir, number)
            assert time.monotonic() < deadline, log_of(run_dir, number)
            time.sleep(0.002)
        time.sleep(moment)
        assert all(rank.is_alive() for rank in attempt.ranks), log_of(run_dir, number)
        attempt.kill(workers=workers)


def finish(words: list[str], run_dir: Path, number: int, ranks: int = 1) -> None:
    with started(words, run_dir, number, ranks) as attempt:
        for rank, process in enumerate(attempt.ranks):
            process.join(240)
            assert process.exitcode == 0, log_of(run_dir, number, rank)


def test_a_run_killed_at_many_moments_reads_the_samples_of_an_uninterrupted_run(folder: Path) -> None:
    """The run has two workers, packs, flips and a blend with changing weights, on 1, 2 and 4 ranks and on one again."""
    rng = random.Random(SEED)
    calm, killed = folder / "calm", folder / "killed"
    finish(arguments(folder, calm), calm, 0)
    expected = steps_of(calm, 0)
    assert list(expected) == list(range(1, NUM_STEPS + 1))
    clips = [sum(key.startswith("f") for key in expected[step]) for step in expected]
    assert not any(clips[:CLIPS_FROM])
    assert sum(clips[CLIPS_FROM:]) > NUM_STEPS // 2

    words = arguments(folder, killed)
    for number in range(KILLS):
        kill_one(words, killed, number, rng)
    for number in range(KILLS):
        assert steps_of(killed, number).items() <= expected.items(), number
    assert losses(killed).items() <= losses(calm).items()

    last = KILLS + len(GROWTH)
    for number, ranks in enumerate(GROWTH, KILLS):
        kill_one(words, killed, number, rng, ranks)
    finish(words, killed, last)
    for number, ranks in enumerate(GROWTH, KILLS):
        shares = [steps_of(killed, number, rank) for rank in range(ranks)]
        for step in set.intersection(*map(set, shares)):
            assert sorted(key for share in shares for key in share[step]) == sorted(expected[step]), (number, step)
    assert steps_of(killed, last).items() <= expected.items()
    reached = {step for number in range(last + 1) for step in steps_of(killed, number)}
    assert reached == set(expected)
    found = losses(killed)
    for step, loss in enumerate(loss_values(calm), 1):  # attempts with different numbers of ranks may have logged it
        for value in found.pop(step):
            assert float.fromhex(value) == pytest.approx(loss, rel=ROUNDING), step
    assert not found
