"""A picture or video of a user before it is decoded, with what a row or the files beside it say of it."""

import errno
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from dit.safe_files import parse_json, read_bytes
from energon_data.prepare.walk import FOLLOW
from energon_data.samples import SampleError

CAPTION_NAMES = ("caption", "text", "prompt")
MAX_FILE_BYTES = 8 << 30
_RESERVED = frozenset({"crc32", "file_name", "label", *CAPTION_NAMES})


@dataclass(frozen=True, kw_only=True)
class Source:
    """One picture or video before it is decoded.

    Attributes:
        name: path within the user's folder or archive, for messages and as the address of the sample.
        read: returns the bytes of the file.
        captions: in the order given; empty if there is none.
        label: class number.
        metadata: further scalars that go with the sample.
    """

    name: str
    read: Callable[[], bytes]
    captions: tuple[str, ...] = ()
    label: Optional[int] = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The sample's name inside a shard: readable, without dots, and of its own for every path."""
        slug = re.sub(r"[^A-Za-z0-9]+", "-", str(PurePosixPath(self.name).with_suffix(""))).strip("-")[-40:]
        return f"{slug}-{hashlib.sha256(self.name.encode()).hexdigest()[:16]}"

    @property
    def extension(self) -> str:
        """Last extension of the name, in lower case, without the dot."""
        return self.name.rpartition(".")[2].lower()


def scalars_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a row that go along with the sample."""
    return {k: v for k, v in row.items() if k not in _RESERVED and isinstance(v, (str, int, float, bool))}


def class_of(value: Any) -> Optional[int]:
    """Return a class number.

    Raises:
        SampleError: it is none.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SampleError("metadata", f"label is {value!r}, not a whole number from 0")
    return value


def leaves(path: Path, root: Path) -> bool:
    """Return whether links lead from a path below `root` to a file outside of it."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def read_file(path: Path, root: Optional[Path]) -> bytes:
    """Return the bytes of a file, which links may not lead out of `root`."""
    try:
        if root is not None and leaves(path, root):
            raise SampleError("path_escape", f"{path.name} is a link to a file outside of {root}; {FOLLOW}")
        return read_bytes(path, MAX_FILE_BYTES)
    except OSError as error:
        reason = "too_large" if error.errno == errno.EFBIG else "unreadable"
        raise SampleError(reason, f"cannot read: {error}") from error


def read_text(data: bytes, what: str) -> str:
    """Return the text of a file called `what`.

    Raises:
        SampleError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise SampleError("bad_caption", f"{what} is not UTF-8: {error}") from error


def read_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object of a file called `what`.

    Raises:
        SampleError: it is none.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise SampleError("bad_json", f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise SampleError("bad_json", f"{what} is a {type(value).__name__}, not an object")
    return value


def captions_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the captions of a row: one string or a list of them, under the first of `CAPTION_NAMES` that is there.

    Raises:
        SampleError: it is neither.
    """
    for name in CAPTION_NAMES:
        value = row.get(name)
        if value is None:
            continue
        several = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in several):
            raise SampleError("bad_caption", f"{name} is {value!r:.80}, neither text nor a list of texts")
        return tuple(text.strip() for text in several if text.strip())
    return ()
