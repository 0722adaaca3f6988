"""The lock of a run folder: one holder at a time, which has a name; no lock outlives its process."""

import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import asdict

import pytest
import torch.distributed as dist

from dit.errors import EXIT_PREEMPTED, BusyError, ConfigError, exit_code
from dit.monitoring import run_lock
from dit.monitoring.guards import PreemptionFlag
from dit.monitoring.heartbeat import Beat
from dit.monitoring.run_lock import LOCK_FILE, RunLock


@pytest.fixture
def no_wait(monkeypatch):
    monkeypatch.setattr(run_lock, "WAIT_S", 0.0)


def take(run_dir):
    """Take the lock as rank 0 of a world of one; return it."""
    lock = RunLock(run_dir)
    lock.__enter__()
    own_world = not dist.is_initialized()  # another test in this process may have started one
    if own_world:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        lock.agree()
    finally:
        if own_world:
            dist.destroy_process_group()
    return lock


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path, no_wait, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    first = take(tmp_path / "run")
    holder = json.loads((tmp_path / "run" / LOCK_FILE).read_text())
    with pytest.raises(ConfigError) as raised:
        take(tmp_path / "run")
    message = str(raised.value)
    for words in (str(os.getpid()), socket.gethostname(), holder["started"], "job 4711", "choose another folder"):
        assert words in message
    assert first.is_ours()
    first.__exit__(None, None, None)
    second = take(tmp_path / "run")
    assert (first.is_ours(), second.is_ours()) == (False, True)
    second.__exit__(None, None, None)


def _hold(run_dir, ready):
    RunLock(run_dir).__enter__()
    ready.set()
    signal.pause()


def test_a_crash_releases_the_lock(tmp_path, no_wait):
    """After `kill -9` of the holder, the folder is free at once."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(20)
    with pytest.raises(ConfigError, match=f"process {holder.pid} on "):
        take(tmp_path)
    holder.kill()
    holder.join()
    take(tmp_path).__exit__(None, None, None)


def test_a_new_run_waits_for_a_process_that_is_ending(tmp_path, caplog):
    """For example after a requeue: a line names the other process, and the run starts when that has ended."""
    first = take(tmp_path)
    ending = threading.Timer(0.5, first.__exit__, (None, None, None))
    ending.start()
    with caplog.at_level(logging.WARNING):
        second = take(tmp_path)
    ending.join()
    assert second.is_ours()
    assert caplog.text.count(f"in use by process {os.getpid()} on") == 1
    assert "waiting up to 30 s" in caplog.text
    second.__exit__(None, None, None)


def test_a_request_to_stop_ends_the_wait(tmp_path, monkeypatch):
    """Rank 0 exits with code 75 before the wait is over, and leaves the lock to the other process."""
    monkeypatch.setattr(run_lock, "WAIT_S", 10.0)
    first = take(tmp_path)
    request = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    began = time.monotonic()
    with PreemptionFlag() as preemption:
        request.start()
        with pytest.raises(SystemExit) as stopped:
            RunLock(tmp_path, waiting=preemption.exit_immediately).__enter__()
    request.join()
    assert stopped.value.code == EXIT_PREEMPTED
    assert time.monotonic() - began < 8
    assert first.is_ours()
    first.__exit__(None, None, None)


def _hold_with_a_writer(run_dir, seconds):
    lock = RunLock(run_dir)
    lock.__enter__()
    subprocess.Popen(["sleep", str(seconds)], pass_fds=[lock.descriptor])
    os._exit(0)


def test_a_new_run_waits_for_the_save_of_a_dead_process(tmp_path, no_wait, caplog):
    """The writer of the dead process has the lock and ends after the save."""
    holder = multiprocessing.get_context("fork").Process(target=_hold_with_a_writer, args=(tmp_path, 0.5))
    holder.start()
    holder.join()
    with caplog.at_level(logging.WARNING):
        take(tmp_path).__exit__(None, None, None)
    assert "which has ended; its checkpoint is still being written; waiting up to 900 s" in caplog.text


@pytest.fixture
def orphaned(tmp_path):
    """Take the lock for a process whose launcher is dead according to its heartbeat."""
    lock = take(tmp_path)
    beat = Beat(0, socket.gethostname(), os.getpid(), 3, "computes", 0.0, 0.0, "", is_orphan=True)
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / "rank_0.json").write_text(json.dumps(asdict(beat)))
    yield lock
    lock.__exit__(None, None, None)


def test_a_new_run_waits_for_a_process_with_a_dead_launcher(tmp_path, no_wait, orphaned, caplog):
    """That process saves, which may take longer than the usual wait."""
    ending = threading.Timer(0.5, orphaned.__exit__, (None, None, None))
    ending.start()
    with caplog.at_level(logging.WARNING):
        take(tmp_path).__exit__(None, None, None)
    ending.join()
    assert f"is in use by process {os.getpid()} on" in caplog.text
    assert "whose launcher is dead; it saves and will stop; waiting up to 900 s" in caplog.text


def test_a_process_with_a_dead_launcher_is_a_busy_error(tmp_path, monkeypatch, orphaned):
    monkeypatch.setattr(run_lock, "ENDING_WAIT_S", 0.0)
    with pytest.raises(BusyError, match=r"whose launcher is dead; .* give the same command again after") as raised:
        take(tmp_path)
    assert exit_code(raised.value) == 70


def test_the_heartbeat_of_an_earlier_attempt_is_ignored(tmp_path, no_wait, orphaned):
    path = tmp_path / "heartbeats" / "rank_0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": 1}))
    with pytest.raises(ConfigError, match="stop that run"):
        take(tmp_path)


@pytest.mark.parametrize("place", ["/proc/nope", "file/run", "bad\0name"])
def test_a_folder_that_cannot_be_created_is_a_configuration_error(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"training.run_dir=.*cannot be used: .*choose another folder"):
        take(os.path.join(tmp_path, place))


def test_a_disk_without_locks_is_warned_about(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(run_lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    assert take(tmp_path).is_ours()
    assert "has no locks (No locks available)" in caplog.text


def test_a_pipe_in_place_of_the_lock_does_not_hang(tmp_path, no_wait):
    """The lock file is read only if it is a regular file."""
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(ConfigError, match="cannot be used"):
        take(tmp_path)


def test_a_folder_recreated_by_another_run_is_refused(tmp_path):
    """A lock on a deleted file protects nothing; the new folder belongs to the process that locked it there."""
    first = take(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert first.is_ours()  # no other process has the folder, so the exit record may be written
    second = take(tmp_path / "run")
    assert (first.is_ours(), second.is_ours()) == (False, True)
