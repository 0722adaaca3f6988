"""Deaths under torchrun: of a rank, after which `--max-restarts` restarts all ranks, and of torchrun itself."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from dit.monitoring.sinks import read_records
from dit.monitoring.time_limit import started_at
from tests.integration.runs import checkpoint, checkpoints, losses, mock, outcome, started, steps_logged, wait_for

pytestmark = pytest.mark.slow

STEPS = 60
SLOWEST_S = 60.0  # limit for a restart on two busy cores


def ranks_of(torchrun: subprocess.Popen) -> dict[int, int]:
    """Return the process ids of the ranks of torchrun, by rank."""
    found = {}
    for thread in Path(f"/proc/{torchrun.pid}/task").glob("*/children"):
        for child in map(int, thread.read_text().split()):
            with suppress(FileNotFoundError, ProcessLookupError):
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                found |= {int(v[5:]): child for v in variables if v.startswith(b"RANK=")}
    return found


def lock_of(run_dir: Path) -> dict[str, Any]:
    """Return the owner recorded in the run's lock; empty while the lock is being written."""
    try:
        return json.loads((run_dir / "run.lock").read_text())
    except (OSError, ValueError):
        return {}


def arguments(run_dir: Path, *, is_async: bool) -> list[str]:
    settings = {"training__num_steps": STEPS, "training__log_interval": 1, "checkpoint__interval": 5}
    return mock(run_dir, **settings, checkpoint__async_save=is_async, data__dataset_size=64, model__hidden_size=256)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    with started(arguments(folder / "run", is_async=False), folder / "log", ranks=2) as process:
        assert process.wait(300) == 0, (folder / "log").read_text()
    return folder / "run"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(calm: Path, tmp_path: Path, rank: int) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(arguments(run_dir, is_async=rank == 1), log, ranks=2, torchrun=["--max-restarts", "2"]) as process:
        wait_for(process, lambda: steps_logged(run_dir) >= 12, log)
        os.kill(ranks_of(process)[rank], signal.SIGKILL)
        killed, died_at, first = time.time(), steps_logged(run_dir), lock_of(run_dir)["pid"]
        wait_for(process, lambda: lock_of(run_dir).get("pid", first) != first, log)
        lock = lock_of(run_dir)
        spawned, locked = started_at(lock["pid"]), datetime.fromisoformat(lock["started"]).timestamp()
        assert process.wait(300) == 0, log.read_text()
    assert died_at < STEPS
    assert outcome(run_dir)["code"] == 0
    assert losses(run_dir) == losses(calm)
    records = [r for r in read_records(run_dir / "metrics.jsonl") if r["kind"] == "scalars"]
    assert {r["attempt"] for r in records} == {1, 2}
    again = next(r for r in records if r["attempt"] == 2)
    assert died_at - 8 <= again["step"] <= died_at + 3
    stages = {"until_started": spawned - killed, "imports": locked - spawned, "until_step": again["time"] - locked}
    print(json.dumps({"rank": rank, "restart_s": again["time"] - killed, **stages, "killed_at": died_at}))
    assert again["time"] - killed < SLOWEST_S


def test_ranks_save_and_stop_when_torchrun_is_killed(tmp_path: Path) -> None:
    """The same command resumes after the last step: no step is lost or repeated."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    words = [*arguments(run_dir, is_async=True), "checkpoint.interval=1000", "training.num_steps=100000"]
    with started(words, log, ranks=2) as process:
        wait_for(process, lambda: steps_logged(run_dir) >= 3, log)
        ranks = [psutil.Process(pid) for pid in ranks_of(process).values()]
        try:
            os.kill(process.pid, signal.SIGKILL)
            assert psutil.wait_procs(ranks, timeout=120)[1] == [], log.read_text()
        finally:
            for rank in ranks:
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
    assert log.read_text().count(f"its launcher, process {process.pid}, is dead; it saves and stops") == 2
    record = outcome(run_dir)
    assert (record["code"], record["reason"]) == (75, "preempted")
    assert checkpoints(run_dir) == [checkpoint(run_dir, record["step"]).name]

    with started([*words, f"training.stop_at_step={record['step'] + 2}"], log, ranks=2) as process:
        process.wait(300)
    scalars = [r for r in read_records(run_dir / "metrics.jsonl") if r["kind"] == "scalars"]
    assert [r["step"] for r in scalars] == list(range(1, record["step"] + 3)), log.read_text()
    assert [r["attempt"] for r in scalars].count(2) == 2
