"""Read files that a stranger may have written: regular files of bounded size and depth; in run folders, no links."""

import errno
import json
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dit.errors import ConfigError

LONGEST_FILE = 64 << 20  # bytes; records of a run or a data set have fewer
DEEPEST = 100  # lists and tables inside of each other
LONGEST_INTEGER = 20  # characters; all integers of 64 bits have fewer


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = True) -> int:
    """Open a regular file and return its descriptor; a file that `flags` create gets mode 644.

    Args:
        follow: also open the target of a link. Files in a run folder are opened without: a link there could make the
            run read or overwrite any other file of its user.

    Raises:
        ConfigError: it is a link, and `follow` is False.
        OSError: it cannot be opened, or is not a regular file: a pipe would block, a device may have no end.
    """
    if not follow:
        refuse_link(path)
        flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o644)  # without it, opening a pipe waits for the other end
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_bytes(path: Path, limit: int = LONGEST_FILE, *, follow: bool = True) -> bytes:
    """Read a regular file of at most `limit` bytes; see `open_regular`.

    Raises:
        OSError: it cannot be read, is not a regular file, or is longer.
    """
    with open(open_regular(path, follow=follow), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit:,} bytes", str(path))
    return data


def refuse_link(path: Path) -> None:
    """Refuse a link in a run folder.

    Raises:
        ConfigError: `path` is a link.
    """
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link to {os.readlink(path)}, and a run reads and writes only inside of its own folder; "
            "delete the link, then start the run again"
        )


def refuse_links(folder: Path, allowed: Collection[str] = ()) -> None:
    """Refuse links among the entries of a run folder, except those with an allowed name.

    Raises:
        ConfigError: an entry is a link.
    """
    for entry in os.scandir(folder):
        if entry.name not in allowed:
            refuse_link(Path(entry.path))


def make_folder(path: Path) -> Path:
    """Create a folder inside of a run folder, if it does not exist, and return it.

    Raises:
        ConfigError: it is a link.
        OSError: it cannot be created.
    """
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text whose nesting and integers are bounded.

    Raises:
        ValueError: it is no JSON, is nested more than `DEEPEST` levels, or has an integer of more than 64 bits.
    """
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    level, depth = [value], 0
    while level := [node for node in level if isinstance(node, (dict, list))]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return value


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(digits)} digits, more than any of 64 bits")
    return int(digits)
