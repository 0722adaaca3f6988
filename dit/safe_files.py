"""Readers for untrusted files: only regular files of bounded size and depth; no links in run folders."""

import errno
import io
import json
import math
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Optional, TypeVar

from dit.errors import ConfigError, UserError

Record = TypeVar("Record")
LONGEST_FILE = 64 << 20  # bytes; records of runs and data sets are smaller
PIECE = 1 << 20  # bytes read at a time
DEEPEST = 100  # levels of nested lists and tables
LONGEST_INTEGER = 20  # characters; enough for all 64-bit integers
LONGEST_YAML = 1 << 20  # bytes; parsing this many takes seconds
MOST_MEMBERS = 1000  # of an archive
LONGEST_ARRAY = 4 << 30  # bytes of an array of an archive that is read at once
TOO_DEEP = f"nested deeper than {DEEPEST} levels"


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = True) -> int:
    """Open a regular file and return its descriptor; a file that `flags` create gets mode 644.

    Args:
        follow: also open the target of a link. Files in a run folder are opened with False: a link there could make the
            run read or overwrite any other file of its user.

    Raises:
        ConfigError: the path is a link, and `follow` is False.
        OSError: the file cannot be opened, or is not a regular file: a pipe would block, a device may be endless.
    """
    if not follow:
        refuse_link(path)
        flags |= os.O_NOFOLLOW
    # Without O_NONBLOCK, opening a pipe waits for the other end.
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file or folder is the one at a path; False after it was deleted or moved."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def open_binary(path: Path, *, follow: bool = True) -> io.BufferedReader:
    """Open a regular file for reading; see `open_regular`."""
    return open(open_regular(path, follow=follow), "rb")


def open_to_append(path: Path) -> BinaryIO:
    """Open a file of a run folder for reading and appending, and create it if needed; links are refused."""
    return open(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, follow=False), "ab+")


def read_bytes(path: Path, limit: int = LONGEST_FILE, *, follow: bool = True) -> bytes:
    """Read a regular file, see `open_regular`; raise OSError also for a file of more than `limit` bytes."""
    with open_binary(path, follow=follow) as file:
        data = bytearray()
        # In pieces, because `read(n)` allocates n bytes at once.
        while len(data) <= limit and (piece := file.read(min(PIECE, limit + 1 - len(data)))):
            data += piece
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit:,} bytes", str(path))
    return bytes(data)


def refuse_link(path: Path) -> None:
    """Refuse a link in a run folder."""
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link to {os.readlink(path)}, and a run reads and writes only inside its own folder; "
            "delete the link, then start the run again"
        )


def refuse_links(folder: Path, allowed: Collection[str] = ()) -> None:
    """Refuse links among the entries of a run folder, except those with an allowed name."""
    for entry in os.scandir(folder):
        if entry.name not in allowed:
            refuse_link(Path(entry.path))


def make_folder(path: Path) -> Path:
    """Create a folder inside a run folder if needed, and return it."""
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def check_regular(path: Path) -> None:
    """Check that a path is a regular file, before a library opens it; see `open_regular`."""
    os.close(open_regular(path))


def read_json(path: Path, error: type[UserError], cure: str, limit: int = LONGEST_FILE) -> Any:
    """Return the value of a JSON file, see `parse_json`; raises `error` with one line that ends with the cure."""
    return _read(path, parse_json, error, cure, limit)


def read_yaml(path: Path, error: type[UserError], cure: str) -> Any:
    """Return the value of a YAML file, see `parse_yaml`; raises `error` with one line that ends with the cure."""
    return _read(path, parse_yaml, error, cure, LONGEST_YAML)


def _read(path: Path, parse: Callable[[bytes], Any], error: type[UserError], cure: str, limit: int) -> Any:
    try:
        return parse(read_bytes(path, limit))
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}; {cure}") from problem
    except ValueError as problem:
        raise error(f"{path} cannot be read: {' '.join(str(problem).split())}; {cure}") from problem


@contextmanager
def valid_entries(place: object, error: type[UserError], cure: str) -> Iterator[None]:
    """Raise failures caused by invalid entries of an untrusted record as `error`, with its place and the cure."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as problem:
        raise error(f"{place} has an entry that cannot be used: {problem!r:.200}; {cure}") from problem


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text whose nesting and integers are bounded.

    Raises:
        ValueError: the text is not JSON, is nested deeper than `DEEPEST` levels, or has an integer of more than 64
            bits.
    """
    try:
        value = json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:  # its text names line 1 even if a caller parses line 7 of a file
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        raise ValueError(f"{error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level, depth = [value], 0
    while level := [node for node in level if isinstance(node, (dict, list))]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(TOO_DEEP)
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return value


def read_own(path: Path, kind: Callable[..., Record]) -> Optional[Record]:
    """Return an object from its fields in a JSON file of a run folder; None if it is missing or has another form."""
    try:
        return kind(**parse_json(read_bytes(path, follow=False)))
    except (OSError, TypeError, ValueError):
        return None


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(digits)} digits, which exceeds 64 bits")
    return int(digits)


def parse_yaml(text: str | bytes) -> Any:
    """Return the plain value of a YAML text, or raise a ValueError; 0123 is the number 123, as in YAML 1.2."""
    import yaml  # imported here because the checkpoint writer only reads JSON

    class Loader(yaml.SafeLoader):
        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            digits = node.value.replace("_", "")
            return int(digits) if digits.lstrip("+-").isdecimal() else super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error


def read_torch(source: Path | bytes | IO[bytes]) -> Any:
    """Load a file of `torch.save` on the host; only tensors and plain containers are allowed.

    Args:
        source: a path, the content of a file, or a file that is open for reading.

    Raises:
        ValueError: the archive is damaged, or compressed: torch never compresses, and a small file could expand to fill
            the memory.
        OSError: the file cannot be read.
        Exception: torch raises many types of errors if the file is damaged or contains other objects.
    """
    import torch

    if isinstance(source, Path):
        opened: IO[bytes] = open_binary(source)
    else:
        opened = io.BytesIO(source) if isinstance(source, bytes) else source
    with opened as file:
        if zipfile.is_zipfile(file):
            try:
                with zipfile.ZipFile(file) as archive:
                    stored = sum(member.file_size for member in archive.infolist())
            except zipfile.BadZipFile as error:
                raise ValueError(str(error)) from error
            if stored > file.seek(0, os.SEEK_END):
                raise ValueError(f"an archive of {file.tell():,} bytes that expands to {stored:,} bytes")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file; each tensor is read on request.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
        SafetensorError: it is damaged.
    """
    from safetensors import safe_open

    check_regular(path)
    return safe_open(path, framework="pt")


def read_array(path: Path) -> Any:
    """Return the numbers of a `.npy` file as a NumPy array.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not an array of numbers, or is too short for the shape in its header.
    """
    import numpy as np

    check_regular(path)
    try:
        return np.array(np.lib.format.open_memmap(path, mode="r"))  # checks the size before memory is allocated
    except OverflowError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class StoredArray:
    """An array of numbers or texts in an `.npz` file; its content is read once, in order.

    Attributes:
        is_fortran: the first axis is the innermost.
    """

    shape: tuple[int, ...]
    dtype: Any
    is_fortran: bool
    _file: IO[bytes]

    def read(self) -> Any:
        """Return the array; raise ValueError if it is damaged or has more than `LONGEST_ARRAY` bytes."""
        array = self._next(math.prod(self.shape))
        return array.reshape(self.shape[::-1]).T if self.is_fortran else array.reshape(self.shape)

    def blocks(self, rows: int) -> Iterator[Any]:
        """Yield up to `rows` entries of the first axis at a time; errors as in `read`."""
        if self.is_fortran:
            array = self.read()
            yield from (array[start : start + rows] for start in range(0, len(array), rows))
            return
        for start in range(0, self.shape[0], rows):
            count = min(rows, self.shape[0] - start)
            yield self._next(count * math.prod(self.shape[1:])).reshape(count, *self.shape[1:])

    def _next(self, count: int) -> Any:
        import numpy as np

        size = count * self.dtype.itemsize
        if size > LONGEST_ARRAY:
            raise ValueError(f"{size:,} bytes, more than {LONGEST_ARRAY:,}")
        try:
            data = self._file.read(size)
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(str(error) or type(error).__name__) from error
        if len(data) < size:
            raise ValueError("an array that is shorter than its header says")
        return np.frombuffer(data, self.dtype)


@contextmanager
def open_npz(path: Path) -> Iterator[dict[str, StoredArray]]:
    """Yield the arrays of an `.npz` file by name; objects are not loaded, because they can execute code.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such archive, is damaged, or holds something other than arrays of numbers or texts.
    """
    with open_binary(path) as file:
        try:
            archive = zipfile.ZipFile(file)
            members = archive.infolist()
            if len(members) > MOST_MEMBERS:
                raise ValueError(f"an archive of more than {MOST_MEMBERS} members")
            arrays = {member.filename.removesuffix(".npy"): _stored(archive, member) for member in members}
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OverflowError) as error:
            raise ValueError(str(error) or type(error).__name__) from error
        yield arrays


def _stored(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> StoredArray:
    import numpy as np

    file = archive.open(member)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{member.filename} has version {version} of NumPy's format, expected 1.0 or 2.0")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.kind not in "biufU":
        raise ValueError(f"{member.filename} holds {dtype}, not numbers")
    if file.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
        raise ValueError(f"{member.filename} is not as long as its header says")
    return StoredArray(shape, dtype, is_fortran, file)
