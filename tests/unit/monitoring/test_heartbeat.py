"""The rank that heartbeats name as the cause of a hang."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dit.monitoring.exit_record import read_outcome
from dit.monitoring.heartbeat import Beat, Heartbeat, machine, read_beats, verdict


def beats(*phases: tuple[int, str]) -> dict[int, Beat]:
    """Return beats of ranks on other machines, from their steps and phases."""
    now = time.time()
    return {rank: Beat(rank, f"node{rank}", 1, step, phase, now, now, "") for rank, (step, phase) in enumerate(phases)}


def judge(found: dict[int, Beat], world_size: int, silent_s: float = 50, silent: int = -1) -> tuple:
    """Return the verdict of rank 0; one rank has been silent for 100 s."""
    return verdict(found, {rank: 100.0 * (rank == silent) for rank in found}, 0, world_size, silent_s)


def test_a_silent_rank_is_named_before_a_late_rank():
    found = beats((7, "reduces the gradient"), (6, "reads data"), (7, "reduces the gradient"))
    text, blamed, silent = judge(found, 3, silent=2)
    assert (blamed, silent) == ([2], True)
    assert "rank 2 (node2, process 1) reduces the gradient after step 7" in text
    assert "has been silent for 1m40s" in text
    assert judge(found, 3, silent_s=500, silent=2)[1:] == ([1], False)
    assert judge(found, 4, silent_s=500, silent=2)[0] == "rank 3 never wrote a heartbeat"


@pytest.mark.parametrize("late", [(6, "saves"), (7, "reads data")])
def test_the_earliest_phase_of_the_earliest_step_is_late(late):
    assert judge(beats((7, "reduces the gradient"), late, (7, "updates")), 3)[1:] == ([1], False)


def test_no_rank_is_blamed_if_all_have_the_same_progress():
    text, blamed, silent = judge(beats((7, "saves"), (7, "saves")), 2)
    assert (blamed, silent) == ([], False)
    assert "all 2 ranks are in the same phase" in text


def test_a_stopped_or_dead_process_of_this_machine_is_detected_at_once():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = beats((7, "updates"), (7, "updates"))
    found[1] = replace(found[1], host=socket.gethostname(), machine=machine(), pid=child.pid)
    try:
        assert judge(found, 2)[1] == []
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert "stopped (SIGSTOP" in judge(found, 2)[0]
    finally:
        child.kill()
        child.wait()
    assert judge(found, 2)[0].endswith("is dead")


RANK_1 = """
import sys
from dit.monitoring.heartbeat import Heartbeat
with Heartbeat(sys.argv[1], 1, 2, 0.6) as heart:
    heart.phase.enter("samples", 8)
    if sys.argv[2] == "fails":
        raise SystemExit(1)
"""


@pytest.mark.parametrize(("way", "late"), [("completes", ([0], False)), ("fails", ([1], True))])
def test_a_rank_that_has_completed_the_run_is_not_dead(tmp_path, way, late):
    """Rank 0 may write the samples of the last step for minutes after the other ranks have ended."""
    subprocess.run([sys.executable, "-c", RANK_1, str(tmp_path), way], check=False)
    for host in (socket.gethostname(), "another machine"):
        beat = replace(read_beats(tmp_path)[1], host=host)
        assert judge({**beats((8, "samples")), 1: beat}, 2, silent=1)[1:] == late
        assert judge({**beats((None, "starts")), 1: beat}, 2, silent=1)[1:] == ([1], True), "an earlier attempt ended"


def test_only_a_rank_without_progress_ends_with_a_verdict(tmp_path):
    """Any change of phase is progress; the exit record has the verdict, and the record of the run has the incident."""
    codes, ended = [], threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with Heartbeat(tmp_path, 0, 2, 0.6, end=end) as heart:
        for step in range(8):
            heart.phase.enter("computes", step)
            time.sleep(0.15)
        assert not codes
        assert read_beats(tmp_path)[0].phase == "computes"
        heart.phase.enter("reduces the gradient", 8)
        assert ended.wait(20)
        assert "test_heartbeat.py" in read_beats(tmp_path)[0].where
    assert codes[0] == 70
    found = read_outcome(tmp_path)
    assert (found.reason, found.step, found.rank) == ("hang", 8, 0)
    assert "rank 1 never wrote a heartbeat" in found.error
    assert "after step 8 (test_heartbeat.py" in found.error, "where this rank waits"
    told = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert (told["kind"], told["incident"], told["details"]["blamed"]) == ("incident", "hang", [1])


def test_process_ids_of_other_containers_are_ignored():
    """Containers may have equal host names; the same process id may then belong to another process."""
    found = beats((7, "updates"), (7, "updates"))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    found[1] = replace(found[1], host=socket.gethostname(), machine=machine(), pid=gone.pid)
    assert judge(found, 2)[1] == [1]
    boot, _, namespace = machine().partition(" ")
    assert boot
    assert namespace
    for other in (f"{boot} pid:[1]", f"another {namespace}", ""):
        found[1] = replace(found[1], machine=other)
        assert judge(found, 2)[1] == []


def test_heartbeats_name_their_machine_and_other_files_are_ignored(tmp_path):
    (tmp_path / "heartbeats").mkdir()
    for name in ("rank_x.json", "rank_1.json"):
        (tmp_path / "heartbeats" / name).write_text("{}")
    with Heartbeat(tmp_path, 0, 1, None, end=pytest.fail):
        assert (read_beats(tmp_path)[0].machine, read_beats(tmp_path)[0].pid) == (machine(), os.getpid())
    assert not (tmp_path / "heartbeats" / "rank_1.json").exists(), "of an attempt on more ranks"


HELD_UP = """
import sys
from dit.monitoring.heartbeat import Heartbeat
with Heartbeat(sys.argv[1], 0, 1, 1.8) as heart:
    heart.phase.enter("computes", 3)
    print("waits", flush=True)
    input()
"""


def test_time_in_which_a_process_was_stopped_does_not_count_as_a_hang(tmp_path):
    """For example during sleep of a laptop or after Ctrl-Z; a hang afterwards still counts."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as stack:
        for name in ("goes_on", "hangs"):
            (tmp_path / name).mkdir()
        goes_on, hangs = (
            stack.enter_context(subprocess.Popen([sys.executable, "-c", HELD_UP, str(tmp_path / name)], **pipes))
            for name in ("goes_on", "hangs")
        )
        for child in (goes_on, hangs):
            assert child.stdout.readline() == b"waits\n"
            os.kill(child.pid, signal.SIGSTOP)
        time.sleep(4.0)
        for child in (goes_on, hangs):
            os.kill(child.pid, signal.SIGCONT)
        time.sleep(0.9)
        assert goes_on.poll() is hangs.poll() is None
        goes_on.stdin.write(b"\n")
        goes_on.stdin.flush()
        assert (goes_on.wait(20), hangs.wait(20)) == (0, 70)


def write_beat(folder: Path, at: float) -> None:
    """Write the heartbeat of rank 1 on another machine, whose clock shows `at`."""
    (folder / "heartbeats").mkdir(exist_ok=True)
    beat = Beat(1, "node1", 1, 3, "computes", at, at, "", "another machine")
    (folder / "heartbeats" / "rank_1.json").write_text(json.dumps(asdict(beat)))


@pytest.mark.parametrize("skew_s", [-3600, 3600])
def test_the_clock_of_another_machine_does_not_matter(tmp_path, skew_s):
    """A rank is silent if it stops writing, whatever time its files state."""
    heart = Heartbeat(tmp_path, 0, 2, 0.6)
    for _ in range(8):
        write_beat(tmp_path, time.time() + skew_s)
        assert "silent" not in heart.explain()
        time.sleep(0.06)
    time.sleep(0.4)
    assert "rank 1 (node1, process 1) computes after step 3 () has been silent for " in heart.explain()


def test_a_rank_of_another_machine_that_fell_silent_ends_the_start(tmp_path):
    """During the start, only silence counts: the rank ends after its limit of 3 s, and within 3 s after that."""
    write_beat(tmp_path, time.time() + 3600)
    ended = threading.Event()
    with Heartbeat(tmp_path, 0, 2, 3.0, end=lambda code: ended.set()):
        assert ended.wait(30)
    error = read_outcome(tmp_path).error
    assert "has been silent for " in error
    assert 3 <= int(re.search(r"rank 0 starts for (\d+)s", error)[1]) < 6


LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
RANK = """
import os, sys, time
from dit.monitoring.guards import PreemptionFlag
from dit.monitoring.heartbeat import Heartbeat
with PreemptionFlag() as flag, Heartbeat(sys.argv[1], 0, 1, 1.2) as heart:
    print(os.getpid(), flush=True)
    for _ in range(2000):
        if flag.requested:
            break
        heart.phase.go_on()
        time.sleep(0.01)
    print(flag.signal_name, flush=True)
"""


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_with_a_dead_launcher_gets_a_stop_request(tmp_path, launched):
    """A process that was not started by a launcher outlives its shell."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    environ |= {"TORCHELASTIC_RUN_ID": "1"} if launched else {}
    command = [sys.executable, "-c", LAUNCHER, RANK, str(tmp_path)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as launcher:
        rank = int(launcher.stdout.readline())
        try:
            launcher.kill()
            launcher.wait()
            if launched:
                assert launcher.stdout.read() == "SIGTERM\n"  # complete when the process has ended, after its last beat
            else:
                time.sleep(1.0)
                os.kill(rank, 0)
            assert read_beats(tmp_path)[0].is_orphan == launched
        finally:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
