"""Kill -9 at random moments of a run on pictures and clips: every step consumes the samples of an undisturbed run."""

import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.integration.runs import loss_values, losses
from tests.support.attempts import CLIPS_FROM, Files, arguments, attempt, children, finish, prepare_media
from tests.support.ranks import is_alive

pytestmark = pytest.mark.slow

KILLS, GROWTH = 6, [2, 4, 2]  # number of kills on one rank, then the number of ranks of each later attempt
NUM_STEPS = 48
SEED = 9
ROUNDING = 1e-4  # relative, fp32: more ranks sum in another order, and updates amplify the difference
SETTINGS = {"training__num_steps": NUM_STEPS, "checkpoint__interval": 3}


def kill(ranks: list[BaseProcess], *, workers: bool) -> None:
    """Kill all ranks at once, with their workers or without."""
    left = [child for rank in ranks for child in children(rank)]
    for rank in ranks:
        (os.killpg if workers else os.kill)(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.join()
    deadline = time.monotonic() + 10
    while any(map(is_alive, left)):
        assert time.monotonic() < deadline, "workers outlive their run"
        time.sleep(0.01)


def kill_one(words: list[str], files: Files, rng: random.Random) -> None:
    """Start the run again, and kill it a few steps later at a random time within a step."""
    after, moment, workers = rng.randrange(3), 0.1 * rng.random(), rng.random() < 0.5
    with attempt(words, files) as ranks:
        deadline = time.monotonic() + 120
        while len(files.steps()) < after + 1:
            assert all(rank.is_alive() for rank in ranks), files.log()
            assert time.monotonic() < deadline, files.log()
            time.sleep(0.002)
        time.sleep(moment)
        assert all(rank.is_alive() for rank in ranks), files.log()
        kill(ranks, workers=workers)


def test_a_run_killed_at_many_moments_reads_the_samples_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """The run has two workers, packs, flips and a blend with changing weights, on 1, 2 and 4 ranks and on one again."""
    rng = random.Random(SEED)
    prepare_media(tmp_path)
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    finish(arguments(tmp_path, calm, **SETTINGS), Files(calm, 0))
    expected = Files(calm, 0).steps()
    assert list(expected) == list(range(1, NUM_STEPS + 1))
    clips = [sum(key.startswith("f") for key in expected[step]) for step in expected]
    assert not any(clips[:CLIPS_FROM])
    assert sum(clips[CLIPS_FROM:]) > NUM_STEPS // 2

    words = arguments(tmp_path, killed, **SETTINGS)
    attempts = [Files(killed, number, ranks) for number, ranks in enumerate([1] * KILLS + GROWTH)]
    for files in attempts[:KILLS]:
        kill_one(words, files, rng)
        assert files.steps().items() <= expected.items(), files.number
    assert losses(killed).items() <= losses(calm).items()

    for files in attempts[KILLS:]:
        kill_one(words, files, rng)
        shares = [files.steps(rank) for rank in range(files.ranks)]
        for step in set.intersection(*map(set, shares)):
            assert sorted(key for share in shares for key in share[step]) == sorted(expected[step]), (files, step)
    last = Files(killed, len(attempts))
    finish(words, last)
    assert last.steps().items() <= expected.items()
    assert {step for files in (*attempts, last) for step in files.steps()} == set(expected)
    found = losses(killed)
    for step, loss in enumerate(loss_values(calm), 1):  # attempts with different numbers of ranks may have logged it
        for value in found.pop(step):
            assert float.fromhex(value) == pytest.approx(loss, rel=ROUNDING), step
    assert not found
