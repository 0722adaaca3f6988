"""One rank of two is stopped, or waits for something of its own: the run ends, and that rank is named."""

import os
import signal
import time
from pathlib import Path

import pytest

from dit.monitoring.heartbeat import read_beats
from dit.monitoring.sinks import read_records
from tests.faults.test_numbers import arguments
from tests.integration.runs import outcome, started, steps_logged, wait_for

LIMIT_S = 12.0


@pytest.mark.matrix
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    """SIGSTOP: nothing in that process runs any more; the other waits in a collective, ends, and says for whom."""
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
    (incident,) = [r for r in read_records(run_dir / "metrics.jsonl") if r["kind"] == "incident"]
    assert (incident["incident"], incident["details"]["blamed"]) == ("hang", [1])
    waiting = next(beat for beat in incident["details"]["beats"] if beat["rank"] == 0)
    assert waiting["step"] >= 3
    assert waiting["where"]
