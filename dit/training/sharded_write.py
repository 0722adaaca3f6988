"""Megatron-Core's distributed save, made so that a disk that fails on one rank fails the save on all, at once.

Two things stand in the way. Rank 0 writes small files of its own between collectives: an error raised there leaves the
other ranks waiting until they time out. And torch's file writers answer a disk that refuses with a `RuntimeError` about
file positions, from which nobody learns that the disk is full.
"""

import functools
import io
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from dit.errors import CheckpointError


def write_sharded(state: dict[str, Any], directory: Path) -> None:
    """Write a sharded state dictionary; every rank calls this, and it fails on every rank or on none.

    Raises:
        OSError: this rank could not write its part.
        CheckpointError: another rank could not.
    """
    failures: list[Exception] = []
    with _failures_kept(failures):
        try:
            dist_checkpointing.save(state, str(directory))
        except CheckpointException as error:
            if not failures:
                raise CheckpointError(
                    f"{list(error.failures) or 'other ranks'} could not write; see their errors"
                ) from error
    if failures:
        raise failures[0]


class _Results(queue.Queue):
    """What became of this rank's writes, and of nobody else's.

    They are made before this process goes on, so no manager process is needed (which costs seconds to start).
    """

    def __init__(self, failures: list[Exception]) -> None:
        super().__init__()
        self.failures = failures

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, Exception):
            self.failures.append(item)
        super().put(item, block, timeout)


@contextmanager
def _failures_kept(failures: list[Exception]) -> Iterator[None]:
    """Collect what goes wrong on this rank instead of raising it where the other ranks cannot see it."""
    results = _Results(failures)
    writer = filesystem_async.FileSystemWriterAsync
    changes: list[tuple[Any, str, Any]] = [
        (filesystem_async, "_get_write_results_queue", lambda: results),
        (filesystem_async, "_write_item", _with_reason(filesystem_async._write_item)),
        (writer, "finish", _kept(writer.finish, failures)),
        (common.TorchCommonSaveStrategy, "save_common", _kept(_save_common, failures)),
        (serialization, "save_config", _kept(serialization.save_config, failures)),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def _kept(function: Callable[..., None], failures: list[Exception]) -> Callable[..., None]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except OSError as error:
            failures.append(error)

    return run


def _save_common(_: Any, state: dict[str, Any], directory: str) -> None:
    if dist.get_rank() == 0:
        data = io.BytesIO()
        torch.save(state, data)
        (Path(directory) / common.COMMON_STATE_FNAME).write_bytes(data.getbuffer())


def _with_reason(write_item: Callable[..., Any]) -> Callable[..., Any]:
    """Raise the operating system's error instead of what torch's writer makes of it."""

    @functools.wraps(write_item)  # Megatron-Core looks at the signature
    def write(*args: Any, **kwargs: Any) -> Any:
        try:
            return write_item(*args, **kwargs)
        except RuntimeError as error:
            behind = error.__cause__ or error.__context__
            while behind is not None and not isinstance(behind, OSError):
                behind = behind.__cause__ or behind.__context__
            if behind is None:
                raise
            raise behind from None

    return write
