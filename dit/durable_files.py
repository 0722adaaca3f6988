"""Atomic replacement of small files: after a crash, a file has either its old or its new content."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path

from dit.errors import CheckpointError


def fsync(path: Path) -> None:
    """Make a file, or renames and new files inside a folder, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; one `os.write` may write fewer."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def create(path: Path) -> int:
    """Create a file and return its descriptor for writing; a file or link of that name is deleted first."""
    with suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)


def write_atomic(path: Path, content: str | bytes, *, part: Path | None = None, flush: bool = True) -> None:
    """Replace the file at `path` atomically and durably: write a temporary file, flush it, rename it, flush the folder.

    A link at `path` is replaced, not followed.

    Args:
        part: temporary file on the same disk; None for a file next to `path`.
        flush: False if the file does not need to survive a power loss.

    Raises:
        OSError: one of these steps failed; the old file then still exists (or the new one, if only the last step
            failed).
    """
    # The process id distinguishes the temporary files of ranks that write the same file on one machine.
    part = path.with_name(f"{path.name}.{os.getpid()}.part") if part is None else part
    try:
        descriptor = create(part)
        try:
            write_all(descriptor, content if isinstance(content, bytes) else content.encode())
            if flush:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    if flush:
        fsync(path.parent)


def write_record(path: Path, text: str) -> None:
    """Replace a record of the run, as `write_atomic` does; raise a `CheckpointError` (exit code 5) if that fails."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; free space or fix the permissions, then resume"
        ) from error


def strict_json(value: object, *, indent: int | None = None) -> str:
    """Serialise plain containers as JSON that every reader accepts.

    Finite floats keep their exact value. JSON has no non-finite floats: they become the strings "NaN", "Infinity" and
    "-Infinity", which `float` reads back.
    """
    return json.dumps(_name_non_finite(value), allow_nan=False, indent=indent)


def _name_non_finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _name_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_name_non_finite(item) for item in value]
    return value
