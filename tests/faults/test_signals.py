"""SIGTERM at random moments, including start and last save: the run saves within a step and resumes to the bit."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.kill_campaign import RANKS, RESUME, SETTINGS, phases_of, wait_for_phase
from tests.integration.runs import assert_same_bits, checkpoint, checkpoints, losses, outcome, read_tensors
from tests.support.attempts import Files, arguments, attempt, finish, prepare_media

pytestmark = pytest.mark.slow

STEPS, SIGNALS, SEED = 90, 30, 3
MOMENTS = (*RESUME, "training", "beginning a save", "copying to the host", "writing", "a part is written", "starting")


def stop_at(words: list[str], files: Files, phase: str, number: int, rng: random.Random) -> tuple[list[int], int]:
    """Start the run and signal all ranks in a phase; return their exit codes, and the newest step at that moment."""
    with attempt(words, files, phases_of) as ranks:
        first = rng.randrange(1, 3)
        if phase == "starting":
            time.sleep(0.3 * rng.random())
        else:
            wait_for_phase(ranks, files, phase, first, 4)
            time.sleep(0.01 * rng.random())
        done = max(files.steps(0), default=0)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)
        for rank in ranks:
            rank.join(120)
            assert not rank.is_alive(), files.log()
        return [rank.exitcode for rank in ranks], done


def test_a_signalled_run_saves_within_a_step_and_resumes(tmp_path: Path) -> None:
    """The run saves asynchronously every two steps; both ranks get the same random signal."""
    rng = random.Random(SEED)
    prepare_media(tmp_path)
    settings = {**SETTINGS, "training__num_steps": STEPS, "checkpoint__async_save": True}
    calm, run_dir = tmp_path / "calm", tmp_path / "asked"
    finish(arguments(tmp_path, calm, **settings), Files(calm, 0, RANKS))
    words, reached = arguments(tmp_path, run_dir, **settings), 0
    moments = [MOMENTS[i % len(MOMENTS)] for i in range(SIGNALS)]
    rng.shuffle(moments)
    for number, phase in enumerate(moments):
        files = Files(run_dir, number, RANKS)
        codes, done = stop_at(words, files, phase, rng.choice([signal.SIGTERM, signal.SIGUSR1]), rng)
        steps = files.steps(0)
        if not steps:  # there was nothing to save; before Python installs the handler, the signal kills the rank
            assert set(codes) <= {75, -signal.SIGTERM, -signal.SIGUSR1}, (phase, codes, files.log())
            continue
        assert codes == [75] * RANKS, (phase, codes, files.log())
        assert min(steps) == reached + 1, "it goes on where it was asked to stop"
        reached = max(steps)
        assert reached <= done + 2  # the current step, and one that ended while the signal was sent
        assert checkpoints(run_dir)[-1] == checkpoint(run_dir, reached).name
        assert (outcome(run_dir)["code"], outcome(run_dir)["step"]) == (75, reached)
    assert 20 < reached < STEPS
    finish(words, Files(run_dir, SIGNALS, RANKS))
    assert losses(run_dir) == losses(calm)
    assert all(len(values) == 1 for values in losses(run_dir).values())
    assert_same_bits(*(read_tensors(checkpoint(path, STEPS)) for path in (run_dir, calm)))
