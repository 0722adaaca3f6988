"""An undecoded picture or video of a user, with its captions, class and metadata."""

import errno
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional

from dit.errors import DataError
from dit.safe_files import LONGEST_INTEGER, read_bytes
from energon_data.prepare.walk import FOLLOW
from energon_data.samples import SampleError

CAPTION_NAMES = ("captions", "caption", "text", "prompt")
MAX_FILE_BYTES = 8 << 30
_RESERVED = frozenset({"crc32", "file_name", "label", *CAPTION_NAMES})


class Span(NamedTuple):
    """Start and end in seconds from the first frame of a video; the end may be open."""

    start: float
    end: Optional[float]

    def __str__(self) -> str:
        return f"{self.start}" if self.end is None else f"{self.start},{self.end}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """An undecoded picture or video.

    Attributes:
        name: path within the user's folder or archive, for messages and as the address of the sample.
        span: start and end in seconds of a clip of a video; None for the complete video.
        repeats: number of reads in one pass over the data.
        references: return the bytes of the pictures that it is edited from.
    """

    name: str
    read: Callable[[], bytes]
    captions: tuple[str, ...] = ()
    label: Optional[int] = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    span: Optional[Span] = None
    repeats: int = 1
    references: tuple[Callable[[], bytes], ...] = ()

    @property
    def address(self) -> str:
        """Name of the file, followed by `#t=` and the span, for messages."""
        return self.name if self.span is None else f"{self.name}#t={self.span}"

    @property
    def key(self) -> str:
        """Name of the sample inside a shard: readable, without dots, and unique for every address."""
        return self._key(self.address)

    @property
    def origin(self) -> str:
        """Key of the file, shared by all of its clips."""
        return self._key(self.name)

    def _key(self, address: str) -> str:
        slug = re.sub(r"[^A-Za-z0-9]+", "-", str(PurePosixPath(self.name).with_suffix(""))).strip("-")[-40:]
        return f"{slug}-{hashlib.sha256(address.encode()).hexdigest()[:16]}"


def scalars_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a row that are stored with the sample."""
    return {k: v for k, v in row.items() if k not in _RESERVED and isinstance(v, (str, int, float, bool))}


def span_of(row: Mapping[str, Any]) -> Optional[Span]:
    """Return the span from `start` and `end` of a row, None without them."""
    start, end = row.get("start"), row.get("end")
    if start is None and end is None:
        return None
    for name, value in (("start", start), ("end", end)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):
            raise SampleError("metadata", f"{name} is {value!r:.40}, not a number of seconds from 0")
    span = Span(float(start or 0), None if end is None else float(end))
    if span.end is not None and span.end <= span.start:
        raise SampleError("metadata", f"the end, {span.end} s, is not after the start, {span.start} s")
    return span


def class_of(value: Any) -> Optional[int]:
    """Return a class number."""
    if value is None:
        return None
    if isinstance(value, str) and value.strip().isdecimal() and len(value) <= LONGEST_INTEGER:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SampleError("metadata", f"label is {value!r:.40}, not an integer from 0")
    return value


def leaves(path: Path, root: Path) -> bool:
    """Return whether a path below `root` leads through links to a file outside of it."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def check_inside(paths: Iterable[Path], root: Path) -> None:
    """Check that paths do not lead out of a folder, before a library reads them."""
    for path in paths:
        if leaves(path, root):
            raise DataError(f"{path} is outside of {root}; {FOLLOW}")


def read_file(path: Path, root: Optional[Path]) -> bytes:
    """Return the bytes of a file; links may not lead out of `root`."""
    try:
        if root is not None and leaves(path, root):
            raise SampleError("path_escape", f"{path.name} is a link to a file outside of {root}; {FOLLOW}")
        return read_bytes(path, MAX_FILE_BYTES)
    except OSError as error:
        reason = "too_large" if error.errno == errno.EFBIG else "unreadable"
        raise SampleError(reason, f"cannot read: {error}") from error


def read_text(data: bytes, name: str) -> str:
    """Return the text in a file."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        place = f"byte {error.object[error.start]:#04x} at position {error.start}"
        raise SampleError("bad_caption", f"{name} is not UTF-8: {place}; save it as UTF-8") from error


def captions_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the captions of a row: a string or a list, under the first name of `CAPTION_NAMES` that has text."""
    for name in CAPTION_NAMES:
        value = row.get(name)
        if value is None:
            continue
        several = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in several):
            raise SampleError("bad_caption", f"{name} is {value!r:.80}, not a text or a list of texts")
        if captions := tuple(text.strip() for text in several if text.strip()):
            return captions
    return ()
