"""Hang detection: a stopped rank ends the run and is named; a suspended run and a slow rewind are no hangs."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dit.checkpoint.checkpointer import Checkpointer
from dit.monitoring.heartbeat import read_beats
from tests.faults import injections
from tests.faults.test_numbers import BAD, arguments
from tests.integration import actions
from tests.integration.runs import incidents, outcome, started, steps_logged, wait_for
from tests.support.faults import together
from tests.support.ranks import Job, is_alive, run_jobs

LIMIT_S = 12.0


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    """SIGSTOP freezes one process; the other rank times out in a collective, and its error names the stopped rank."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    words = arguments(run_dir, "dp2", training__num_steps=100_000, training__hang_timeout_s=LIMIT_S)
    with started(words, log, ranks=2, torchrun=["--shutdown-timeout", "3"]) as process:
        wait_for(process, lambda: steps_logged(run_dir) >= 3 and len(read_beats(run_dir)) == 2, log)
        stopped = read_beats(run_dir)[1]
        os.kill(stopped.pid, signal.SIGSTOP)
        began = time.monotonic()
        process.wait(timeout=120)
        assert time.monotonic() - began < 60
    record = outcome(run_dir)
    assert (record["code"], record["reason"], record["rank"]) == (70, "hang", 0)
    for words in (f"rank 1 ({stopped.host}, process {stopped.pid})", "stopped (SIGSTOP", "rank 0 "):
        assert words in record["error"], record["error"]
    (incident,) = incidents(run_dir)
    assert (incident["incident"], incident["details"]["blamed"]) == ("hang", [1])
    recorded = json.loads((run_dir / "heartbeats" / "collectives_0.json").read_text())
    assert recorded["entries"][-1]["profiling_name"].startswith("gloo:")
    assert len(recorded["entries"]) > 3
    waiting = next(beat for beat in incident["details"]["beats"] if beat["rank"] == 0)
    assert waiting["step"] >= 3
    assert waiting["where"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_suspended_run_continues_when_it_wakes(tmp_path: Path, ranks: int) -> None:
    """All processes stop for longer than `hang_timeout_s`, as when a batch system suspends them.

    A rank may be suspended inside a collective, so the pause is shorter than a collective may take.
    """
    run_dir, log = tmp_path / "run", tmp_path / "log"
    words = arguments(run_dir, "dp2", training__num_steps=100_000, training__hang_timeout_s=LIMIT_S / 2)
    with started(words, log, ranks=ranks) as process:
        wait_for(process, lambda: steps_logged(run_dir) >= 3 and len(read_beats(run_dir)) == max(1, ranks), log)
        pids = [beat.pid for beat in read_beats(run_dir).values()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.75 * LIMIT_S)
        before = steps_logged(run_dir)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(LIMIT_S)
        assert process.poll() is None, log.read_text()[-2000:]
        assert steps_logged(run_dir) > before
    assert not any(is_alive(pid) for pid in pids)
    assert incidents(run_dir) == []


@contextmanager
def slow_to_go_back(seconds: float) -> Iterator[None]:
    """Delay every rewind, as a large checkpoint would."""
    rewind = Checkpointer.rewind

    def slow(self: Checkpointer, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return rewind(self, *args, **kwargs)

    with mock.patch.object(Checkpointer, "rewind", slow):
        yield


@pytest.mark.slow
def test_reading_a_checkpoint_slowly_is_not_a_hang(tmp_path: Path) -> None:
    """Neither at a rewind nor at the start."""
    settings = {"training__on_bad_numbers": "rewind", "training__hang_timeout_s": LIMIT_S / 2}
    bad = partial(injections.injected, {"step": BAD, "rank": None, "place": "data"})
    fault = partial(together, bad, partial(slow_to_go_back, LIMIT_S))
    job = Job(actions.train, {"arguments": arguments(tmp_path / "run", "dp2", **settings), "fault": fault})
    assert run_jobs(tmp_path / "world", {"run": job})["run"].code == 0
    assert [r["incident"] for r in incidents(tmp_path / "run")] == ["not_finite", "rewind"]
