"""What is said of a checkpoint that verifies and still does not load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from dit.errors import CheckpointError, UserError
from dit.training.exit_record import is_peer_lost


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what libraries raise over the content of a checkpoint into one error that names it.

    Hashes only say that the files are those that were sealed. They may have been sealed incomplete, by another version,
    or by somebody else. Errors that say nothing about the content pass through: those with a cure of their own, a lost
    peer, a device that is out of memory.

    Raises:
        CheckpointError: naming the folder and the library's reason.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause = _first_failure(error)
        if isinstance(cause, (UserError, torch.OutOfMemoryError)) or is_peer_lost(cause):
            if cause is error:
                raise
            raise cause from error
        reason = str(cause).partition("\n")[0]
        raise CheckpointError(
            f"{folder} is what was saved, by its hashes, but cannot be loaded ({type(cause).__name__}: {reason}); "
            "restore it from a copy, or remove that folder to use an older checkpoint"
        ) from error


def _first_failure(error: BaseException) -> BaseException:
    """Return the first rank's error behind torch's `CheckpointException`, which is no `Exception` itself."""
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures[min(error.failures)][0]
    return error
