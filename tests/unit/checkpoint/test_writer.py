"""The processes that write checkpoints: the parts of all ranks become one checkpoint or none, whatever fails."""

import errno
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dit.checkpoint.background import writer as writer_module
from dit.checkpoint.background.writer import ORDER, SharedMemory, Writer, WriterProcess
from dit.checkpoint.manifest import verify_folder
from dit.checkpoint.saves import Saves
from dit.checkpoint.store import CheckpointStore
from dit.errors import CheckpointError, SaveError
from dit.settings import CheckpointConfig
from tests.unit.checkpoint.checkpoints import leftovers, make_store, newest_step, newest_valid
from tests.unit.checkpoint.test_checkpoint_crashes import Trip, crashes

RANKS = 3
META = {"consumed_samples": 8, "held_out_loss": None}
NUM_KILLS = 6


def content(step, rank):
    """Return the files of a rank, a function of step and rank: bytes of odd length, and a tensor after eight bytes."""
    seeded = random.Random(f"{step} {rank}")
    values = torch.arange(seeded.randrange(20_000, 40_000), dtype=torch.float32) + step
    files = {
        f"rank_{rank}.safetensors": [bytes(8), values, values[:5]],
        f"loader/dp_{rank}.pt": [seeded.randbytes(777)],
    }
    return files | ({"state.json": [b"{}"], "empty": [b""]} if rank == 0 else {})


def as_bytes(pieces):
    return b"".join(piece if isinstance(piece, bytes) else piece.numpy().tobytes() for piece in pieces)


def expected(step, ranks=RANKS):
    return {name: as_bytes(pieces) for rank in range(ranks) for name, pieces in content(step, rank).items()}


class World:
    """Writers of a few ranks, used as by their training processes."""

    def __init__(self, root, ranks=RANKS, **config):
        self.root, self.count, self.come = root, itertools.count(1), {}
        self.config = CheckpointConfig(**{"keep_last": 9, **config})
        self.writers = [WriterProcess(root, rank, ranks, self.config) for rank in range(ranks)]
        self.store = CheckpointStore(root, self.config)

    def order(self, step, ranks=None):
        token = f"{id(self)}.{next(self.count)}"
        for rank, process in enumerate(self.writers):
            if ranks is None or rank in ranks:
                process.save(step, token, content(step, rank), {**META, "step": step} if rank == 0 else None)

    def reply(self, rank=0, timeout_s=60.0):
        deadline, come = time.monotonic() + timeout_s, self.come.setdefault(rank, [])
        while not come:
            assert time.monotonic() < deadline, f"no reply of rank {rank}"
            come += self.writers[rank].replies()
            time.sleep(0.005)
        return come.pop(0)

    def save(self, step):
        self.order(step)
        return [self.reply(rank)["error"] for rank in range(len(self.writers))]

    def close(self):
        for process in self.writers:
            with suppress(OSError):
                process.process.send_signal(signal.SIGCONT)
            process.close(30.0)


@pytest.fixture
def world(tmp_path):
    opened = []

    def open_world(**settings):
        opened.append(World(tmp_path / "checkpoints", **settings))
        return opened[-1]

    yield open_world
    for one in opened:
        one.close()


def files_of(store, step):
    folder = store.path(step)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_saved(store, step, ranks=RANKS):
    """Check that the checkpoint verifies and has the files of all ranks and no temporary file."""
    manifest = verify_folder(store.path(step))
    files = files_of(store, step)
    del files["manifest.json"]
    assert files == expected(step, ranks)
    assert {name: record.sha256 for name, record in manifest.files.items()} == {
        name: hashlib.sha256(text).hexdigest() for name, text in expected(step, ranks).items()
    }
    assert manifest.meta["step"] == step


def test_the_parts_of_all_ranks_become_one_checkpoint(world):
    """Two saves of different sizes. A held-out loss that arrives during a save is attached after it."""
    saving = world()
    assert saving.save(3) == [None] * RANKS
    saving.order(6)
    saving.writers[0].request({"do": "attach", "step": 6, "meta": {"held_out_loss": 0.5, "held_out_step": 6}})
    saving.writers[0].request({"do": "attach", "step": 5, "meta": {"held_out_loss": 0.1}})
    assert [saving.reply()["error"] for _ in range(3)] == [None] * 3
    for step in (3, 6):
        assert_saved(saving.store, step)
    assert verify_folder(saving.store.path(6)).held_out_loss == 0.5
    assert leftovers(saving.store) == []


def test_changes_after_the_save_request_are_not_written(world):
    """Training continues to change the tensors."""
    saving = world(ranks=1)
    values = torch.ones(1_000_000)
    saving.writers[0].save(1, "token", {"a": [values]}, META)
    values.zero_()
    assert saving.reply()["error"] is None
    assert files_of(saving.store, 1)["a"] == torch.ones(1_000_000).numpy().tobytes()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_full_disk_of_one_rank_fails_the_save_and_the_next_succeeds(world, rank):
    saving = world()
    assert saving.save(1) == [None] * RANKS
    limits = resource.prlimit(saving.writers[rank].process.pid, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    saving.order(2)
    error = saving.reply()["error"]
    assert "checkpoint of step 2 was not written" in error
    assert "File too large" in error
    assert "the limit for a file is 50000 bytes (ulimit -f); raise it" in error
    assert (f"rank {rank}:" in error) == (rank > 0)
    assert "intact" in error
    assert newest_step(saving.store) == 1
    assert leftovers(saving.store) == []
    resource.prlimit(saving.writers[rank].process.pid, resource.RLIMIT_FSIZE, limits)
    for process in saving.writers[1:]:
        process.restart()  # as `Saves.poll` does on every rank
    assert saving.save(3) == [None] * RANKS
    assert_saved(saving.store, 3)


def test_a_copy_above_the_limit_of_a_file_names_the_limit(world):
    """The copy is in memory, but the limit applies to it, too."""
    saving = world(ranks=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large.* 50000 bytes \(ulimit -f\); raise it, or set"):
            saving.order(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("error", ["there is no earlier checkpoint", "no space."])
def test_the_last_of_several_failures_in_a_row_is_a_sentence(error):
    saves: Any = SimpleNamespace(failures=2, reports=Mock())
    with pytest.raises(SaveError, match=rf"^{error.strip('.')}\. This is failure 3 in a row\.$"):
        Saves._failed(saves, 3, error)


def test_a_folder_deleted_during_a_save_fails_the_save(world):
    saving = world(ranks=2)
    saving.order(1, ranks=[0])
    deadline = time.monotonic() + 30
    while not (saving.store.partial_path(1) / ORDER).exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    saving.root.rename(saving.root.with_name("elsewhere"))
    assert "No such file" in saving.reply()["error"]
    assert saving.save(2) == [None, None]
    assert_saved(saving.store, 2, ranks=2)


def test_a_root_that_is_not_a_folder_fails_the_save(world):
    saving = world(ranks=1)
    saving.root.write_text("")
    saving.order(1)
    assert "checkpoint of step 1 was not written" in saving.reply()["error"]


def test_a_missing_part_fails_the_save(world):
    saving = world(save_timeout_s=0.3)
    saving.order(1, ranks=[0, 2])
    assert "no files arrived from 1 of 3 ranks (1)" in saving.reply()["error"]
    assert leftovers(saving.store) == []


def test_records_of_a_killed_attempt_are_ignored(world):
    """Rank 1 finds the folder of a killed attempt; rank 0 begins later."""
    saving = world(ranks=2)
    stale = saving.store.begin(4)
    (stale / ORDER).write_text("another attempt")
    (stale / "rank_1.safetensors").write_text("torn")
    saving.order(4, ranks=[1])
    time.sleep(0.3)
    assert (stale / "rank_1.safetensors").read_text() == "torn"
    saving.count = itertools.count(1)
    saving.order(4, ranks=[0])
    assert [saving.reply(rank)["error"] for rank in range(2)] == [None, None]
    assert_saved(saving.store, 4, ranks=2)


def test_a_part_of_another_save_is_ignored(world):
    """A writer of a killed attempt may leave its file in the folder of the next one."""
    saving = world(ranks=2)
    saving.order(4, ranks=[0])
    folder, deadline = saving.store.partial_path(4), time.monotonic() + 30
    while not (folder / ORDER).exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    (folder / "part_00001.json").write_text(json.dumps({"token": "another", "error": None, "files": {}}))
    time.sleep(0.2)
    saving.count = itertools.count(1)
    saving.order(4, ranks=[1])
    assert [saving.reply(rank)["error"] for rank in range(2)] == [None, None]
    assert_saved(saving.store, 4, ranks=2)


def test_signals_to_the_run_do_not_stop_a_save(world):
    saving = world(ranks=1)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        saving.writers[0].process.send_signal(signal_number)
    assert saving.save(1) == [None]


def test_requests_are_executed_after_the_training_process_has_ended(world):
    """The connection closes at once, without waiting for the last reply."""
    saving = world()
    saving.order(1)
    for process in saving.writers:
        process.close(30.0)
    assert_saved(saving.store, 1)
    assert [process.process.returncode for process in saving.writers] == [0] * RANKS
    saving.writers.clear()


def test_an_orphaned_writer_does_not_wait_for_missing_parts(tmp_path, monkeypatch):
    """Otherwise the next attempt would wait for the lock that this process has."""
    monkeypatch.setattr(writer_module, "ORPHAN_S", 0.2)
    ours, theirs = socket.socketpair()
    memory = SharedMemory()
    settings = {"root": str(tmp_path), "rank": 0, "world_size": 2, "config": CheckpointConfig()}
    alone = Writer(theirs, memory=memory.descriptor, **settings)
    memory.reserve(100)
    memory.write(0, [b"{}"])
    ours.close()
    began = time.monotonic()
    reply = alone.execute({"do": "save", "step": 1, "token": "t", "files": [["a", 0, 2]], "meta": [0, 2]})
    assert "no files arrived from 1 of 2 ranks" in reply["error"]
    assert time.monotonic() - began < 10
    assert os.listdir(tmp_path) == []


def test_the_lock_of_the_run_is_kept_by_the_writer(tmp_path):
    """No other attempt can take the lock until the writer has ended."""
    from dit.monitoring.run_lock import RunLock

    with RunLock(tmp_path) as lock:
        process = WriterProcess(tmp_path / "checkpoints", 0, 1, CheckpointConfig(), lock.descriptor)
    probe = os.open(tmp_path / "run.lock", os.O_RDWR)
    import fcntl

    with pytest.raises(BlockingIOError):
        fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process.close(30.0)
    fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(probe)


@pytest.mark.parametrize("module", ["writer", "copies"])
def test_writers_start_without_torch(module):
    """Importing torch takes seconds. The store of checkpoints, which both import, does not need it, either."""
    code = f"import sys, dit.checkpoint.background.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_killed_writer_is_named_and_replaced(world):
    saving = world(ranks=1)
    assert saving.save(1) == [None]
    saving.writers[0].process.kill()
    saving.writers[0].process.wait()
    with pytest.raises(CheckpointError, match=r"rank 0 was killed by SIGKILL.*intact"):
        saving.writers[0].replies()
    with pytest.raises(CheckpointError, match="step 2 was not written"):
        saving.order(2)
    saving.writers[0].restart()
    assert saving.save(2) == [None]


def test_kill_of_writers_at_random_moments_leaves_a_valid_checkpoint(world):
    """Kill one writer or all: the newest checkpoint verifies, and the next save, also of the same step, succeeds."""
    rng, saving, step = random.Random(5), world(keep_last=2), 1
    assert saving.save(1) == [None] * RANKS
    for _ in range(NUM_KILLS):
        again = rng.random() < 0.3
        saving.order(step if again else step + 1)
        time.sleep(rng.uniform(0, 0.06))
        for process in rng.sample(saving.writers, rng.choice([1, RANKS])):
            process.process.kill()
        time.sleep(rng.uniform(0, 0.02))
        for process in saving.writers:  # a live writer might replace the checkpoint read below
            process.process.kill()
            process.process.wait()
        manifest = newest_valid(saving.store)[1]
        assert manifest.step in (step, step + 1)
        assert_saved(saving.store, manifest.step)
        for process in saving.writers:
            process.restart()
        step = manifest.step + 1
        assert saving.save(step) == [None] * RANKS
        assert_saved(saving.store, step)
    assert leftovers(saving.store) == []


def both_ranks(root, step, timeout_s=20.0):
    """Execute an order on two ranks, in threads of this process; return the error of each rank."""
    pairs = [socket.socketpair() for _ in range(2)]
    replies = {}

    def rank_of(rank):
        memory, files, start = SharedMemory(), [], 0
        texts = {name: as_bytes(pieces) for name, pieces in content(step, rank).items()}
        texts["meta"] = json.dumps({**META, "step": step}).encode()
        memory.reserve(sum(map(len, texts.values())))
        for name, text in texts.items():
            memory.write(start, [text])
            files.append([name, start, len(text)])
            start += len(text)
        settings = {"root": str(root), "rank": rank, "world_size": 2}
        config = CheckpointConfig(keep_last=1, save_timeout_s=timeout_s)
        one = Writer(pairs[rank][1], memory=memory.descriptor, **settings, config=config)
        order = {"do": "save", "step": step, "token": f"token {step}", "files": files[:-1], "meta": files[-1][1:]}
        replies[rank] = one.execute(order)["error"]

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [replies[rank] for rank in range(2)]


def test_crash_of_a_machine_at_every_system_call_leaves_a_valid_checkpoint(tmp_path, monkeypatch):
    """All writers die at once before each changing system call of a save in turn, also while an old one is deleted."""
    monkeypatch.setattr(writer_module, "POLL_S", 0.001)
    assert both_ranks(tmp_path / "former", 10) == [None, None]
    steps = []
    for store in crashes(tmp_path / "former", monkeypatch, lambda store: both_ranks(store.root, 20)):
        steps.append(newest_step(store))
        for step in store.steps():
            assert_saved(store, step, ranks=2)  # no half-written or half-deleted folder has a checkpoint's name
    assert len(steps) > 25
    assert set(steps) == {10, 20}


def test_a_disk_error_at_every_system_call_is_reported_and_damages_no_checkpoint(tmp_path, monkeypatch):
    """Fail each write, flush, rename and mkdir of either rank in turn: rank 0 reports it, or the save succeeds."""

    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(writer_module, "POLL_S", 0.001)
    assert both_ranks(tmp_path / "former", 10) == [None, None]
    failures = 0
    for n in itertools.count(1):
        root = shutil.copytree(tmp_path / "former", tmp_path / str(n))
        with monkeypatch.context() as patched:
            trip = Trip(n, fail)
            trip.install(patched, ("mkdir", "write", "fsync", "rename"))
            errors = both_ranks(root, 20, timeout_s=0.1)
        store = make_store(root, keep_last=2)
        if errors[0] is not None:
            failures += trip.fired  # otherwise a rank was slow and the other one gave up
            assert "intact" in errors[0]
            assert newest_step(store) in (10, 20)  # the last flush comes after the rename
            assert not store.partial_path(20).exists(), f"failure at call {n}"
        else:
            assert_saved(store, 20, ranks=2)
        assert both_ranks(root, 30) == [None, None]
        assert_saved(store, 30, ranks=2)
        shutil.rmtree(root)
        if not trip.fired and errors[0] is None:
            break
    assert failures >= 20
