"""A save that dies, fails or is killed at any moment leaves a valid checkpoint."""

import errno
import itertools
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from dit.checkpoint.manifest import verify_folder
from dit.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import fill, leftovers, make_store, newest_step, newest_valid, save

CHANGING_CALLS = ("mkdir", "write", "fsync", "rename", "unlink", "rmdir")


class Trip:
    """Call `action` at the n-th of the watched system calls, counted over all threads."""

    def __init__(self, n, action):
        self.n, self.action, self.calls = n, action, itertools.count(1)
        self.fired = False

    def install(self, monkeypatch, names):
        for name in names:
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, original):
        def watched(*args, **kwargs):
            if next(self.calls) == self.n:
                self.fired = True
                self.action()
            return original(*args, **kwargs)

        return watched


def crashes(former, monkeypatch, work):
    """Yield a copy of a store for each changing system call of `work`: a process that did it died before this call."""
    for n in itertools.count(1):
        store = make_store(shutil.copytree(former, former.with_name(f"crash_{n}")), keep_last=1)
        child = os.fork()
        if child == 0:
            try:
                Trip(n, lambda: os._exit(9)).install(monkeypatch, CHANGING_CALLS)
                work(store)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9)
        yield store
        newest = newest_step(store)
        store.begin(40)
        assert leftovers(store) == ["iter_0000040.tmp"], f"crash at call {n}"
        assert newest_step(store) == newest
        shutil.rmtree(store.root)
        if status == 0:
            break


def in_a_small_process(check, former):
    """Call `check(former, MonkeyPatch)` in a new process, which forks ten times faster than the one of pytest."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # raises if the process dies
        pool.submit(check, former, pytest.MonkeyPatch()).result()


def check_replacement(former, patch):
    attempts = []
    for store in crashes(former, patch, lambda store: save(store, 20, attempt=2)):
        attempts.append(newest_valid(store)[1].meta.get("attempt"))
        for folder in store.root.glob("iter_" + "[0-9]" * 7):
            verify_folder(folder)  # no half-written or half-deleted folder has a checkpoint's name
    assert len(attempts) > 20
    assert set(attempts) == {None, 2}


def test_crash_while_a_checkpoint_is_replaced_leaves_a_valid_one(two_checkpoints, tmp_path):
    """The checkpoint being replaced is the only one."""
    former = shutil.copytree(two_checkpoints, tmp_path / "former")
    shutil.rmtree(former / "iter_0000010")
    in_a_small_process(check_replacement, former)


def check_attachment(former, patch):
    before, losses = verify_folder(former / "iter_0000020"), []
    meta = {"held_out_loss": 0.5, "held_out_step": 20}
    for store in crashes(former, patch, lambda store: store.attach(20, meta)):
        manifest = verify_folder(store.path(20))
        assert (manifest.files, manifest.created) == (before.files, before.created)
        losses.append(manifest.held_out_loss)
    changed = losses.index(0.5)
    assert losses == [None] * changed + [0.5] * (len(losses) - changed)
    assert changed > 0


def test_crash_while_a_loss_is_attached_leaves_the_checkpoint_valid(two_checkpoints, tmp_path):
    """The checkpoint verifies with its old manifest or the new one."""
    in_a_small_process(check_attachment, shutil.copytree(two_checkpoints, tmp_path / "former"))


def test_failed_attachment_of_a_loss_damages_no_checkpoint(two_checkpoints, tmp_path, monkeypatch):
    store = make_store(shutil.copytree(two_checkpoints, tmp_path / "copy"), keep_last=2)

    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    former = verify_folder(store.path(20))
    with monkeypatch.context() as patched:
        Trip(2, fail).install(patched, ("write", "fsync"))
        with pytest.raises(CheckpointError, match=r"manifest\.json cannot be written.*itself is intact"):
            store.attach(20, {"held_out_loss": 0.5})
    assert verify_folder(store.path(20)) == former
    assert leftovers(store) == []


def test_full_disk_message_has_the_numbers(two_checkpoints, tmp_path):
    """The message has needed and free bytes, also if another library wraps the error."""
    store = make_store(shutil.copytree(two_checkpoints, tmp_path / "checkpoints"))
    needed = verify_folder(store.path(20)).size_bytes
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wrapped = RuntimeError("a thread failed")
    wrapped.__cause__ = full
    for cause in (full, wrapped):
        fill(store.begin(30), 30)
        message = f"full; it needs about {needed} bytes, [0-9]+ are free"
        with pytest.raises(CheckpointError, match=message), store.writing(30):
            raise RuntimeError("Worker failure") from cause
        with pytest.raises(CheckpointError, match="a rank failed"):
            store.publish(30, {})
    assert newest_step(store) == 20


def test_other_errors_propagate_and_cancel_the_save(tmp_path):
    """A bug while writing is raised unchanged, and the unfinished files cannot be published."""
    store = make_store(tmp_path)
    store.begin(1)
    with pytest.raises(ZeroDivisionError), store.writing(1):
        print(1 / 0)
    assert leftovers(store) == []
