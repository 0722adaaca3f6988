"""Locks that protect checkpoints being read: readers hold a shared flock, retention an exclusive one.

The kernel releases a lock when its process exits, for any reason. A file system without locks on folders (NFS, or
Lustre mounted without `flock`) does not protect readers.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dit.errors import CheckpointError
from dit.safe_files import is_at


@contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Prevent the retention of a run from deleting a checkpoint; a later save deletes it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        message = f"{folder} cannot be read: {error.strerror}; restore it, or name another checkpoint"
        raise CheckpointError(message) from error
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        if not is_at(folder, descriptor):
            raise CheckpointError(f"{folder} was deleted at this moment, by the retention of its run")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def to_delete(folder: Path) -> Iterator[bool]:
    """Yield whether the checkpoint has no readers; new readers wait until this exits."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, operation: int) -> bool:
    """Lock a folder if its file system supports locks; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    return True
