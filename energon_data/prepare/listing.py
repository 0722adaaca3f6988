"""What a user's folder holds: files with their captions, classes and metadata, from the usual conventions.

    cats/1.jpg  cats/1.txt                 a caption beside each file (.txt), or a .json object with `caption` and more
    cats/1.jpg  dogs/7.png                 one folder per class (`labels=True`)
    metadata.jsonl  .csv  .parquet         one row per file: `file_name`, `caption` (or `text`, `prompt`), others

A WebDataset of tar files is a listing, too: its samples are read member by member, in the order of the archive.
"""

import csv
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from dit.durable_files import read_regular
from dit.errors import ConfigError, DataError
from energon_data.samples import SampleError

CAPTION_NAMES = ("caption", "text", "prompt")
LISTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
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


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a folder, small enough to be listed by the million; `source` opens what lies beside it.

    Attributes:
        name: path within the folder, with `/`.
        size: bytes, so that an interrupted preparation notices another file under an old name.
        row: of `metadata.jsonl`, `.csv` or `.parquet`, None if there is no such file.
    """

    name: str
    size: int
    label: Optional[int] = None
    row: Optional[dict[str, Any]] = None

    def source(self, folder: Path) -> Source:
        """Read the caption and metadata that lie beside the file.

        Raises:
            SampleError: they are damaged.
        """
        path = folder / self.name
        row = dict(self.row) if self.row is not None else _beside(path)
        captions = captions_of(row)
        metadata = scalars_of(row)
        label = row.get("label") if self.label is None else self.label
        return Source(
            name=self.name, read=lambda: _read(path), captions=captions, label=class_of(label), metadata=metadata
        )


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


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SampleError("too_large", f"{path.stat().st_size} bytes, at most {MAX_FILE_BYTES}")
        return read_regular(path)
    except OSError as error:
        raise SampleError("unreadable", f"cannot read: {error}") from error


def _beside(path: Path) -> dict[str, Any]:
    """Return what `.json` and `.txt` files of the same name say."""
    found: dict[str, Any] = {}
    with_json, with_text = path.with_suffix(".json"), path.with_suffix(".txt")
    if with_json.is_file():
        found = read_object(_read(with_json), with_json.name)
    if with_text.is_file():
        found["caption"] = read_text(_read(with_text), with_text.name)
    return found


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
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
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


def list_folder(folder: Path, extensions: frozenset[str], *, labels: bool = False) -> tuple[list[Entry], list[str]]:
    """List the files of a folder and of those below it, sorted by name.

    Args:
        extensions: which files are samples.
        labels: the folders right below are classes, numbered by name.

    Returns:
        The files, and the names of the classes (empty without `labels`).

    Raises:
        ConfigError: the folder does not exist.
        DataError: it has no such file, one lies outside of every class, or a list of files is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; --in names the folder that holds the files")
    rows = _rows(folder)
    found = [Entry(name=name, size=size) for name, size in _walk(folder, extensions)]
    if rows is not None:
        sizes = {entry.name: entry.size for entry in found}
        # What the list names and the folder lacks stays in: it is counted as a sample that cannot be read.
        found = [Entry(name=name, size=sizes.get(name, -1), row=row) for name, row in sorted(rows.items())]
    if not found:
        raise DataError(
            f"{folder} holds no file that ends in {', '.join(sorted(extensions))}, also not in the folders below it"
        )
    if not labels:
        return found, []
    classes = sorted({entry.name.partition("/")[0] for entry in found if "/" in entry.name})
    outside = [entry.name for entry in found if "/" not in entry.name]
    if outside:
        raise DataError(f"{folder / outside[0]} lies in no class folder, and {len(outside) - 1} other files; move them")
    number = {name: i for i, name in enumerate(classes)}
    labelled = [Entry(name=e.name, size=e.size, row=e.row, label=number[e.name.partition("/")[0]]) for e in found]
    return labelled, classes


def num_other_files(folder: Path, extensions: frozenset[str]) -> int:
    """Count files of other kinds than those a command takes, in a folder without a list of files."""
    if not folder.is_dir() or any((folder / name).is_file() for name in LISTS):
        return 0
    return len(_walk(folder, extensions))


def _walk(folder: Path, extensions: frozenset[str]) -> list[tuple[str, int]]:
    """Return name and size of every file of these kinds; hidden ones and links that leave the folder are left out."""
    root, found = folder.resolve(), []

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot list {error.filename}: {error.strerror}; make the folder readable, or move it away")

    for place, below, names in os.walk(folder, onerror=refuse):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in names:
            path = Path(place, name)
            if name.rpartition(".")[2].lower() not in extensions or name.startswith("."):
                continue
            if not path.is_file() or not path.resolve().is_relative_to(root):
                continue
            found.append((path.relative_to(folder).as_posix(), path.stat().st_size))
    return sorted(found)


def _rows(folder: Path) -> Optional[dict[str, dict[str, Any]]]:
    """Return the rows of the first of `LISTS` by file name; None if the folder has none."""
    present = [folder / name for name in LISTS if (folder / name).is_file()]
    if not present:
        return None
    rows: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(_parsed(present[0]), 1):
        name = row.get("file_name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{present[0]}, row {number}: file_name is {name!r}; name a file relative to {folder}")
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name:
            raise DataError(f"{present[0]}, row {number}: file_name {name!r} leaves the folder; name files inside it")
        name = str(PurePosixPath(name))
        if name in rows:
            raise DataError(f"{present[0]}, row {number}: {name!r} is listed twice; leave one row")
        rows[name] = row
    return rows


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            if path.suffix == ".csv":
                for row in csv.DictReader(lines):
                    yield {k: _scalar(v) for k, v in row.items() if k is not None and v not in (None, "")}
                return
            for line in lines:
                if line.strip():
                    yield read_object(line.encode(), path.name)
    except (OSError, ValueError, csv.Error, SampleError) as error:
        detail = error.detail if isinstance(error, SampleError) else str(error)
        raise DataError(f"cannot read {path}: {detail}; correct the file") from error


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} needs pyarrow, which is not installed: pip install 'megatron-dit[parquet]'"
        ) from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield {name: value for name, value in row.items() if value is not None}
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read {path}: {error}; correct the file") from error


def _scalar(text: str) -> Any:
    """Return a CSV field as the number that it spells, else as text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def list_tars(folder: Path) -> list[Path]:
    """List the tar files of a WebDataset, sorted.

    Raises:
        ConfigError: the path does not exist.
        DataError: there is none.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise ConfigError(f"{folder} is neither a folder nor a file; --in names a folder of .tar files, or one of them")
    found = sorted(path for path in folder.rglob("*.tar") if path.is_file())
    if not found:
        raise DataError(f"{folder} holds no .tar file; for single pictures use `prepare images`")
    return found


def read_tar(path: Path, extensions: frozenset[str]) -> Iterator[Source | tuple[str, SampleError]]:
    """Read the samples of one tar file in its order; members of a sample share the name before the first dot.

    Yields:
        A sample, or the name and reason of one that cannot be used. A truncated archive ends with such a pair.
    """
    name, parts = "", dict[str, bytes]()
    try:
        with tarfile.open(path, "r|") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                place = PurePosixPath(member.name)
                stem, _, part = place.name.partition(".")
                sample = str(place.with_name(stem)) if stem else member.name
                if sample != name and parts:
                    yield _from_parts(path, name, parts, extensions)
                    parts = {}
                name = sample
                if part.lower() in extensions | {"txt", "json", "cls"}:
                    if member.size > MAX_FILE_BYTES:
                        yield f"{path.name}/{member.name}", SampleError("too_large", f"{member.size} bytes")
                        continue
                    content = archive.extractfile(member)
                    parts[part.lower()] = content.read() if content is not None else b""
        if not _has_end(path):
            raise tarfile.ReadError("it has no end marker")
    except (tarfile.TarError, OSError, EOFError) as error:
        yield f"{path.name}/{name}", SampleError("bad_tar", f"the archive is cut short or damaged here: {error}")
        return
    if parts:
        yield _from_parts(path, name, parts, extensions)


def _has_end(path: Path) -> bool:
    """Tell whether an archive ends with two empty blocks; one that is cut between two members does not."""
    with path.open("rb") as file:
        file.seek(-min(1024, path.stat().st_size), os.SEEK_END)
        return file.read() == bytes(1024)


def _from_parts(
    path: Path, name: str, parts: dict[str, bytes], extensions: Iterable[str]
) -> Source | tuple[str, SampleError]:
    where = f"{path.name}/{name}"
    media = [part for part in parts if part in extensions]
    try:
        if len(media) != 1:
            raise SampleError("missing_part", f"{len(media)} pictures or videos of {sorted(parts)}, wanted one")
        row = read_object(parts["json"], "json") if "json" in parts else {}
        if "txt" in parts:
            row["caption"] = read_text(parts["txt"], "txt")
        if "cls" in parts:
            row["label"] = read_text(parts["cls"], "cls")
        captions, label = captions_of(row), class_of(row.get("label"))
    except SampleError as error:
        return where, error
    data = parts[media[0]]
    metadata = scalars_of(row)
    return Source(name=f"{where}.{media[0]}", read=lambda: data, captions=captions, label=label, metadata=metadata)
