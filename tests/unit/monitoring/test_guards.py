"""Requests to stop, and stack dumps; some tests need a separate process."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dit.monitoring import guards
from dit.monitoring.guards import PreemptionFlag, StackWatchdog

PREEMPTED_CHILD = """
import time
from dit.monitoring.guards import PreemptionFlag
with PreemptionFlag() as flag:
    print("ready", flag.requested, flush=True)
    steps = 0
    while not flag.requested:
        for _ in range(5):   # a step is finished whatever arrives meanwhile
            time.sleep(0.01)
            steps += 1
    print(steps % 5, flag.signal_name, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_stops_the_run_at_the_end_of_the_step(number):
    """The process finishes its step and has the name of the signal, also if this test runs under nohup."""
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n{PREEMPTED_CHILD}"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready False\n"
    child.send_signal(number)
    out, _ = child.communicate(timeout=20)
    assert child.returncode == 0
    assert out == f"0 {number.name}\n"


def test_a_run_under_nohup_ignores_the_end_of_its_session():
    words = ["nohup", sys.executable, "-c", PREEMPTED_CHILD]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout.readline() == "ready False\n"
    child.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=20)[0] == "0 SIGTERM\n"


def test_signal_handlers_are_restored():
    """After the run, also after a failure, signals have their previous handlers."""
    before = signal.getsignal(signal.SIGUSR1)
    flag = PreemptionFlag()
    with pytest.raises(ZeroDivisionError), flag:
        print(os.kill(os.getpid(), signal.SIGUSR1) or 1 / 0)
    assert flag.requested
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_request_ends_the_process_at_once_if_there_is_nothing_to_save():
    """During a call and for an earlier request; outside of the context, a signal only sets the flag."""
    reached = []
    with PreemptionFlag() as flag:
        with pytest.raises(SystemExit) as left, flag.exit_immediately():
            print(os.kill(os.getpid(), signal.SIGUSR1), reached.append("too far"))
        assert (left.value.code, reached) == (75, [])
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit) as left, flag.exit_immediately():
            reached.append("too far")
        assert (left.value.code, reached) == (75, [])


def test_a_request_counts_even_if_a_library_replaces_the_exception():
    """torch.asarray of a storage does so while weights are read."""

    def as_array():
        try:
            print(os.kill(os.getpid(), signal.SIGUSR1))
        except SystemExit:
            raise ValueError("could not determine the shape") from None

    with PreemptionFlag() as flag:
        with pytest.raises(SystemExit) as left, flag.exit_immediately():
            as_array()
        assert left.value.code == 75


def test_a_rank_with_a_request_and_a_lost_peer_is_preempted(monkeypatch):
    """The rank detects the lost peer before it gets the signal; other errors stay errors."""
    monkeypatch.setattr(guards, "SIGNAL_SKEW_S", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def ended_by(error, flag):
        with flag.exit_immediately():
            flag.signal_name = "SIGUSR1"
            raise error

    lost = ConnectionResetError("connection reset by peer")
    with pytest.raises(SystemExit) as left:
        ended_by(lost, PreemptionFlag())
    assert left.value.code == 75
    with pytest.raises(ZeroDivisionError):
        ended_by(ZeroDivisionError(), PreemptionFlag())
    with pytest.raises(ConnectionResetError), PreemptionFlag().exit_immediately():
        raise lost


def test_a_rank_that_loses_its_peer_waits_for_a_signal_that_comes_later(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with PreemptionFlag() as flag:
        later = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        later.start()
        with pytest.raises(SystemExit) as left, flag.exit_immediately():
            raise ConnectionResetError("connection reset by peer")
        later.join()
    assert left.value.code == 75


def test_the_watchdog_writes_stacks_only_during_a_hang(tmp_path):
    """While beats arrive it writes nothing; during a hang it writes the stack of every thread; the run continues."""
    path = tmp_path / "stacks" / "rank_0.txt"
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="waiting")
    thread.start()
    with StackWatchdog(path, timeout_s=0.6) as watchdog:
        for _ in range(16):
            time.sleep(0.05)
            watchdog.beat()
        assert path.read_text() == ""
        time.sleep(0.9)
    done.set()
    thread.join()
    text = path.read_text()
    assert "test_the_watchdog_writes_stacks_only_during_a_hang" in text
    assert text.count("(most recent call first)") >= 2
