"""Faults in a training process, as context managers around a run."""

import contextlib
import errno
import itertools
import json
import os
import pkgutil
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parallel_checkpoints import save_state
from dit.checkpoint import state_files
from dit.checkpoint.checkpointer import Checkpointer
from dit.checkpoint.manifest import MANIFEST, FileRecord, Manifest, hash_tree
from dit.checkpoint.store import CheckpointStore
from dit.config_record import TRUST_VARIABLE
from dit.monitoring import run_lock
from dit.monitoring.run_lock import RunLock
from dit.monitoring.run_log import RunLog, open_log
from dit.training.pretrain import Run
from dit.verify.trial import global_values

Fault = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def no_file_beyond(limit: int) -> Iterator[None]:
    """Limit every file that this process writes to `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def saving_fails(limit: int, rank: int) -> Iterator[None]:
    """Limit the files of this rank's checkpoints to `limit` bytes."""
    original = Run.save

    def save(self: Run) -> None:
        with no_file_beyond(limit) if self.groups.rank == rank else contextlib.nullcontext():
            original(self)

    with mock.patch.object(Run, "save", save):
        yield


@contextlib.contextmanager
def index_refused() -> Iterator[None]:
    """Raise a disk-full error when rank 0 writes the index of the checkpoint."""
    original = state_files.write_hashed

    def write(path: Path, pieces: Iterable[memoryview]) -> FileRecord:
        if path.name == state_files.INDEX:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state.json")
        return original(path, pieces)

    with mock.patch.object(state_files, "write_hashed", write):
        yield


@contextlib.contextmanager
def terminated_inside(method: str, call: int = 1) -> Iterator[None]:
    """Send SIGTERM to this process at the start of call number `call` of a method, named `package.module.Class.method`.

    Ranks wait for each other there, so that no rank stops before the others have been signalled.
    """
    original, calls = pkgutil.resolve_name(method), itertools.count(1)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            if dist.get_world_size() > 1:
                dist.barrier()
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    with mock.patch(method, signalled):
        yield


@contextlib.contextmanager
def together(*faults: Fault) -> Iterator[None]:
    """Combine several faults in one run."""
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault())
        yield


@contextlib.contextmanager
def stuck_inside(method: str, seconds: float) -> Iterator[None]:
    """Let every call of a method, named `package.module.Class.method`, take longer than the watchdog allows.

    `seconds` must exceed the duration of a start, because dumping the stack of a running thread can crash Python.
    """
    original = pkgutil.resolve_name(method)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    with mock.patch(method, slow), mock.patch("dit.training.pretrain.STACK_DUMP_AFTER_S", 0.75 * seconds):
        yield


@contextlib.contextmanager
def out_of_memory(name: str) -> Iterator[None]:
    """Raise an out-of-memory error in a function or method, named by its import path."""
    with mock.patch(name, side_effect=torch.OutOfMemoryError("tried to allocate 20.00 GiB")):
        yield


@contextlib.contextmanager
def no_room_for_logs(limit: int) -> Iterator[None]:
    """Limit the log files to `limit` bytes."""

    def limited(*args: Any, **kwargs: Any) -> RunLog:
        with no_file_beyond(limit):
            return open_log(*args, **kwargs)

    with mock.patch("dit.training.pretrain.open_log", limited):
        yield


@contextlib.contextmanager
def flushes_counted(run_dir: Path, out: Path) -> Iterator[None]:
    """Record the flushed bytes and the size of `metrics.jsonl` when each checkpoint is published."""
    metrics, fsync, publish = run_dir / "metrics.jsonl", os.fsync, CheckpointStore.publish
    flushed, sizes = [0], []

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(metrics):
            flushed.append(os.fstat(descriptor).st_size)

    def noted_publish(self: CheckpointStore, *args: Any) -> Any:
        sizes.append((flushed[-1], metrics.stat().st_size))
        out.write_text(json.dumps(sizes))
        return publish(self, *args)

    with mock.patch("os.fsync", noted_fsync), mock.patch.object(CheckpointStore, "publish", noted_publish):
        yield


class _NaN:
    """An objective with NaN targets."""

    def __init__(self, objective: Any) -> None:
        self.objective = objective

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objective, name)

    def prepare(self, *inputs: Any) -> Any:
        prepared = self.objective.prepare(*inputs)
        return replace(prepared, target_TC=prepared.target_TC * float("nan"))


@contextlib.contextmanager
def not_a_number(step: int, rank: int, weights: Path) -> Iterator[None]:
    """Make the loss NaN on one rank in one step; save the final weights, and each rank's last samples."""
    from dit.training import pretrain

    forward_step, close = pretrain.training_forward_step, Run.close

    def poisoned(objective: Any, model: Any, seed: int, done: int, *more: Any) -> Any:
        bad = done + 1 == step and torch.distributed.get_rank() == rank
        return forward_step(_NaN(objective) if bad else objective, model, seed, done, *more)

    def close_and_tell(self: Run) -> None:
        shards = self.state.shards
        full, _ = global_values([(f"weight.{s.name}", s, s.main) for s in shards], self.groups)
        if self.groups.rank == 0:
            torch.save(full, weights)
        weights.with_suffix(f".rank{self.groups.rank}.json").write_text(json.dumps(self.batches.consumed.keys))
        close(self)

    poison = mock.patch.object(pretrain, "training_forward_step", poisoned)
    with poison, mock.patch.object(Run, "close", close_and_tell):
        yield


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock the run folder as another process of rank 0 would; rank 0 detects it first and does not wait."""
    agree = RunLock.agree

    def late(self: RunLock) -> None:
        time.sleep(0.5 if self.rank else 0.0)
        agree(self)

    late_ranks = mock.patch.object(RunLock, "agree", late)
    with mock.patch.object(run_lock, "WAIT_S", 0.0), RunLock(run_dir, int(os.environ.get("RANK", "0"))), late_ranks:
        yield


@contextlib.contextmanager
def port_taken() -> Iterator[None]:
    """Start as a launcher's only rank, at a port that another socket listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with mock.patch.dict(os.environ, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": port}):
            yield


@contextlib.contextmanager
def before_step(step: int, happens: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Call a function before a step."""
    original = Run.step

    def disturbed(self: Run, loss_sums: Tensor, **options: Any) -> float:
        if self.state.step + 1 == step:
            happens(*arguments)
        return original(self, loss_sums, **options)

    with mock.patch.object(Run, "step", disturbed):
        yield


@contextlib.contextmanager
def samples_noted(file: Path) -> Iterator[None]:
    """After every step, append to a file the keys of the samples that it consumed on this rank."""
    original = Run.step

    def noted(self: Run, loss_sums: Tensor, **options: Any) -> float:
        seen = len(self.batches.consumed.keys)
        grad_norm = original(self, loss_sums, **options)
        with file.open("a") as out:
            out.write(json.dumps({"step": self.state.step, "keys": self.batches.consumed.keys[seen:]}) + "\n")
        return grad_norm

    with mock.patch.object(Run, "step", noted):
        yield


@contextlib.contextmanager
def data_state_by_rank(*, has_streams: bool) -> Iterator[None]:
    """Key the data state by rank, which is not allowed, or, without streams, return a different state on each rank."""
    from energon_data.streams import StreamGroup

    def state_dict(self: StreamGroup) -> dict[str, Any]:
        return {"streams": {self._dp_rank: {}}} if has_streams else {"rank": self._dp_rank}

    def load_state_dict(self: StreamGroup, state: dict[str, Any]) -> None:
        assert has_streams or state == self.state_dict()

    with mock.patch.multiple(StreamGroup, state_dict=state_dict, load_state_dict=load_state_dict):
        yield


def deleted(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Delete the run folder before the third step."""
    return before_step(3, shutil.rmtree, run_dir)


def press_ctrl_c() -> None:
    """Raise KeyboardInterrupt as Ctrl-C does, also if a shell started this process with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def interrupted(step: int) -> contextlib.AbstractContextManager[None]:
    """Press Ctrl-C before a step."""
    return before_step(step, press_ctrl_c)


def terminated(step: int) -> contextlib.AbstractContextManager[None]:
    """Send SIGTERM to this process before a step."""
    return before_step(step, signal.raise_signal, signal.SIGTERM)


def cut_off(folder: Path, *, sealed: bool) -> None:
    """Halve the tensor files in all checkpoints of a run; `sealed` updates the manifests so that their hashes match."""
    for checkpoint in (folder / "checkpoints").glob("iter_*"):
        for path in checkpoint.glob("*.safetensors"):
            os.truncate(path, path.stat().st_size // 2)
        if sealed:
            old = Manifest.from_text((checkpoint / MANIFEST).read_text())
            (checkpoint / MANIFEST).write_text(replace(old, files=hash_tree(checkpoint, {})).to_text())


@contextlib.contextmanager
def resaved(folder: Path) -> Iterator[None]:
    """Save the state that a resumed run has loaded, unchanged, to a folder."""
    original = Checkpointer.resume

    def resume(self: Checkpointer, state: Any, mode: str) -> bool:
        is_resumed = original(self, state, mode)
        assert is_resumed
        folder.mkdir(exist_ok=True)
        save_state(folder, state, state.ema)
        return is_resumed

    with mock.patch.object(Checkpointer, "resume", resume):
        yield


def trusting(package: str) -> contextlib.AbstractContextManager[Any]:
    """Trust a package of the user, so that settings records may name its classes."""
    return mock.patch.dict(os.environ, {TRUST_VARIABLE: package})


@contextlib.contextmanager
def own_package(folder: Path, package: str) -> Iterator[None]:
    """Make a user's package in `folder` importable, and trust it."""
    with trusting(package), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        yield


def hooked(record: Path) -> contextlib.AbstractContextManager[Any]:
    """Trust the hook of the tests, which writes to `record`."""
    return mock.patch.dict(os.environ, {TRUST_VARIABLE: "tests", "HOOK_RECORD": str(record)})


@contextlib.contextmanager
def no_wandb() -> Iterator[None]:
    """Raise an error at the first scalar of Weights & Biases."""
    from dit.monitoring.wandb_sink import WandbSink

    with mock.patch.object(WandbSink, "scalars", side_effect=ConnectionError("the service is gone")):
        yield
