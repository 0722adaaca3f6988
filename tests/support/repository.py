"""The clone that contains these tests, and the outputs of commands in it."""

from contextlib import suppress
from itertools import chain
from pathlib import Path
from stat import S_ISDIR

REPOSITORY = Path(__file__).parents[2]

Stamp = tuple[int, int]
"""Size and modification time of a file; zeros for a folder."""


def outputs(folder: Path) -> dict[str, Stamp]:
    """Return the stamps of the data sets, runs and pictures in a folder, by name."""
    patterns = ("data/**/*", "runs/**/*", "wandb/**/*", "*.png", "*.gif")
    stamps: dict[str, Stamp] = {}
    for path in chain.from_iterable(map(folder.glob, patterns)):
        with suppress(FileNotFoundError):  # deleted by another process
            status = path.lstat()
            stamp = (0, 0) if S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
            stamps[str(path.relative_to(folder))] = stamp
    return stamps


def changed(before: dict[str, Stamp], after: dict[str, Stamp]) -> list[str]:
    """Return the names of new, deleted and changed outputs."""
    return sorted({name for name, _ in before.items() ^ after.items()})
