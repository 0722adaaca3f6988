"""Verification of checkpoints by all ranks: every rank reads and hashes its share of the files."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Optional, TypeVar

import torch.distributed as dist

from dit.backends.process_groups import ProcessGroups, gather_objects, raise_together
from dit.checkpoint.manifest import Manifest, verify_folder
from dit.checkpoint.reader_lock import being_read
from dit.errors import CheckpointError, UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")


def on_first_rank(read: Callable[[], T], groups: Optional[ProcessGroups]) -> T:
    """Call `read` on rank 0 and broadcast its result, so that all ranks get the same view of the disk.

    Args:
        groups: of the ranks, all of which call this; None for one process.

    Raises:
        Exception: an error of `read`; other ranks raise a RuntimeError unless it is a `UserError`.
    """
    if groups is None:
        return read()
    result: list[Any] = [None, None]
    if groups.rank == 0:
        try:
            result[0] = read()
        except Exception as error:
            is_known = isinstance(error, UserError)
            result[1] = error if is_known else RuntimeError(f"rank 0 failed: {type(error).__name__}: {error}")
            dist.broadcast_object_list(result)
            raise
    dist.broadcast_object_list(result)
    if result[1] is not None:
        raise result[1]
    return result[0]


@contextmanager
def fails_together(groups: Optional[ProcessGroups], part: str = "read its part of the weights") -> Iterator[None]:
    """Run code on every rank; if it fails on one rank, raise on all ranks, on the failed one its own error.

    Errors other than `UserError` and of files are raised immediately, only on their rank. `part` is the task of a rank.
    """
    failure: Optional[Exception] = None
    try:
        yield
    except OSError as error:
        failure = CheckpointError(f"{error.filename} cannot be read: {error.strerror}; restore or download it again")
    except UserError as error:
        failure = error
    if groups is not None:
        raise_together(failure, CheckpointError(f"another rank could not {part}; see its error"))
    elif failure is not None:
        raise failure


def verified_together(folder: Path, groups: Optional[ProcessGroups], reading: Optional[ExitStack]) -> Manifest:
    """Verify a checkpoint and return its manifest; every rank hashes its share of the files.

    The checkpoint is not deleted until `reading` is closed. A damaged one is an error on every rank.
    """
    share = (0, 1) if groups is None else (groups.rank, groups.world_size)
    problem: Optional[str] = None
    with ExitStack() as stack:
        try:
            stack.enter_context(being_read(folder))
            manifest = verify_folder(folder, share=share)
        except CheckpointError as error:
            problem = str(error)
        problems = [problem] if groups is None else gather_objects(problem)
        if reasons := [problem for problem in problems if problem is not None]:
            raise CheckpointError(reasons[0])
        if reading is not None:
            reading.push(stack.pop_all())
        return manifest


def newest_valid_together(
    candidates: Sequence[Path], groups: Optional[ProcessGroups], reading: Optional[ExitStack]
) -> Optional[tuple[Path, Manifest]]:
    """Return the first checkpoint that verifies, or None. Rank 0 logs a warning for each that does not."""
    for folder in candidates:
        try:
            return folder, verified_together(folder, groups, reading)
        except CheckpointError as error:
            if groups is None or groups.rank == 0:
                logger.warning("skipping checkpoint %s: %s", folder.name, error)
    return None
