"""Files in a user's folder, and reasons why a file is not used."""

import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from dit.errors import DataError
from energon_data.media_files import PICTURES, VIDEOS

COMPANIONS = ("json", "caption", "txt")
"""Extensions of metadata files with the name of a picture, in either case; of several captions the last one counts."""
FOLLOW = "--follow-links reads it"
"""The cure for a link that is not followed."""


class Skipped(NamedTuple):
    """A file or sample that is not used."""

    name: str
    reason: str
    detail: str


def reasons(skipped: Sequence[Skipped]) -> str:
    """Return the three most frequent reasons with their counts, and the first file of each."""
    counts = Counter(skip.reason for skip in skipped).most_common(3)
    first = {skip.reason: f"{skip.name}: {skip.detail}" for skip in reversed(skipped)}
    return "; ".join(f"{count:,} {reason} ({first[reason]})" for reason, count in counts)


def folders_below(folder: Path, follow_links: bool, skipped: list[Skipped]) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and its subfolders, each with the names of its files, without hidden folders and files.

    Args:
        skipped: links to folders that are not read are appended to it.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot list {error.filename}: {error.strerror}; make the folder readable, or move it away")

    for place, below, names in os.walk(folder, onerror=refuse, followlinks=follow_links):
        below[:] = sorted(name for name in below if not name.startswith("."))
        above = [Path(place), *Path(place).parents][: len(Path(place).relative_to(folder).parts) + 1]
        for path in [Path(place, name) for name in below if Path(place, name).is_symlink()]:
            target = path.resolve()
            is_loop = any(parent.resolve().is_relative_to(target) for parent in above)
            if is_loop or not follow_links:
                below.remove(path.name)
                detail = "a link to a folder that contains it" if is_loop else f"a link to a folder; {FOLLOW}"
                skipped.append(Skipped(path.relative_to(folder).as_posix(), "linked_folder", detail))
        yield Path(place), sorted(name for name in names if not name.startswith("."))


def stem_of(name: str) -> str:
    """Return a name without its last extension."""
    return name.rpartition(".")[0]


def composed(name: str) -> str:
    """Return a name with each accent and its letter as one character (NFC); macOS stores them as two."""
    return unicodedata.normalize("NFC", name)


def extension_of(name: str) -> str:
    """Return the last extension in lower case, without the dot; empty if there is none."""
    return name.rpartition(".")[2].lower() if "." in name else ""


def not_read(path: Path, extensions: frozenset[str]) -> Optional[tuple[str, str]]:
    """Return reason and detail why a command that reads `extensions` does not read a file; None if it does."""
    extension = extension_of(path.name)
    if extension in COMPANIONS:
        return "no_picture", "no picture or video has its name"
    if extension not in PICTURES | VIDEOS:
        ending = f"names that end in .{extension} are" if extension else "a name without an extension is"
        return "other_format", f"{ending} not read"
    if extension not in extensions:
        return "other_kind", "`prepare folder` takes pictures and videos"
    if not path.is_file():
        return "not_a_file", "a broken link, or not a regular file"
    return None


def seen_file(path: Path) -> Optional[tuple[str, int, int]]:
    """Return name, size and time of a regular file, or None."""
    try:
        about = path.stat()
    except OSError:
        return None
    return (path.name, about.st_size, about.st_mtime_ns) if stat.S_ISREG(about.st_mode) else None
