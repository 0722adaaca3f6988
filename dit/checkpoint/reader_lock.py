"""Checkpoints that are being read are not deleted: readers share a lock of the folder, retention needs it alone.

The kernel releases a lock with the process that has it, however that ends. A disk without locks of folders (NFS, Lustre
mounted without `flock`) protects no reader.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dit.errors import CheckpointError


@contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Keep a checkpoint from being deleted by the retention of its run, which deletes it at a later save.

    Raises:
        CheckpointError: it is not there, or was deleted at this moment.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        what = f"{folder} cannot be read: {error.strerror}; an older one is used if there is one"
        raise CheckpointError(what) from error
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        if not _is_at(folder, descriptor):
            raise CheckpointError(f"{folder} was deleted at this moment, by the retention of its run")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def to_delete(folder: Path) -> Iterator[bool]:
    """Give whether nobody reads a checkpoint, and keep it so."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, operation: int) -> bool:
    """Lock a folder if its disk has locks; return whether nobody else has it."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    return True


def _is_at(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False
