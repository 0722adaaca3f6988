"""Lists of files: captions, classes and other metadata for the files of a folder, one row each.

    metadata.jsonl  .csv  .parquet    `file_name`, `caption` (or `text`, `prompt`), `label`, and others; `start` and
                                      `end` in seconds define a clip of a video, which may have several such rows

Files that are not in the list are skipped.
"""

import csv
import hashlib
import io
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from dit.errors import ConfigError, DataError
from dit.safe_files import LONGEST_INTEGER, open_binary
from energon_data.prepare.sources import CAPTION_NAMES, leaves
from energon_data.prepare.walk import FOLLOW, composed
from energon_data.samples import SampleError, read_object

LISTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
LONGEST_FIELD = 16 << 20  # characters of a field of a CSV file
KINDS = (".jsonl", ".csv", ".parquet")
Rows = dict[str, list[dict[str, Any]]]
"""Rows by file name; only a video may have several, with different starts or ends."""
_NUMBER = re.compile(r"\s*[+-]?(?!0[0-9])([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
_TEXTS = frozenset({"file_name", "file", *CAPTION_NAMES})  # text even if they look like a number


def find_list(folder: Path, list_file: Optional[Path] = None, *, follow_links: bool = False) -> Optional[Path]:
    """Return the list of files to read: `list_file`, else the first of `LISTS` in the folder, or None."""
    if list_file is not None:
        if not list_file.is_file():
            raise ConfigError(f"--list {list_file} does not exist; name a file of rows, one for each picture or clip")
        if list_file.suffix not in KINDS:
            raise ConfigError(f"--list {list_file} must end in {', '.join(KINDS)}")
        return list_file
    path = next((folder / name for name in LISTS if (folder / name).is_file()), None)
    if path is not None and not follow_links and leaves(path, folder):
        raise DataError(f"{path} is a link to a file outside of {folder}; {FOLLOW}")
    return path


def list_stamp(path: Optional[Path]) -> Optional[list[str]]:
    """Return name and SHA-256 of a list of files, None without one."""
    if path is None:
        return None
    with open_binary(path) as file:
        return [path.name, hashlib.file_digest(file, "sha256").hexdigest()]


def read_list(path: Path, names: Collection[str]) -> Rows:
    """Return the rows of a list by file name."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    spellings = {composed(name): name for name in names} | {name: name for name in names}
    for number, row in enumerate(_parsed(path), 1):
        if "file_name" not in row and "file" in row:
            row["file_name"] = row.pop("file")
        name = row.get("file_name")
        if not isinstance(name, str) or not name:
            entries = f"its entries are {', '.join(row)}" if row else "it has no entries"
            what = f"file_name is {name!r}" if "file_name" in row else f"no file_name, {entries}"
            raise DataError(
                f"{path}, row {number}: {what}; the column file_name names a file relative to --in (`prepare "
                "huggingface` reads pictures inside parquet files)"
            )
        if name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name:
            raise DataError(f"{path}, row {number}: file_name {name!r} leaves the folder; name files inside it")
        name = str(PurePosixPath(name))
        name = spellings.get(name, spellings.get(composed(name), name))
        span = "" if row.get("start") is None and row.get("end") is None else f"{row.get('start')} to {row.get('end')}"
        by_span = rows.setdefault(name, {})
        if by_span and ("" in by_span or span == "" or span in by_span):
            part = f", {span}," if span else ""
            raise DataError(
                f"{path}, row {number}: {name!r}{part} is listed twice; leave one row, or give the clips of a video "
                "different starts or ends"
            )
        by_span[span] = row
    if not rows:
        raise DataError(f"{path} has no row; write one for each file, or move it away")
    return {name: list(of_file.values()) for name, of_file in rows.items()}


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        with io.TextIOWrapper(open_binary(path), "utf-8-sig", newline="") as file:
            yield from _csv(file) if path.suffix == ".csv" else _jsonl(file)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(f"{path} has the byte {byte:#04x}, which is not UTF-8; save the file as UTF-8") from error
    except (OSError, ValueError, csv.Error, SampleError) as error:
        detail = error.detail if isinstance(error, SampleError) else str(error)
        raise DataError(f"cannot read {path}: {detail}; correct the file") from error


def _csv(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.DictReader(lines, strict=True, skipinitialspace=True)
    if len(header := reader.fieldnames or ()) == 1 and re.search("[;\t]", header[0]):
        raise ValueError(f"the header {header[0]!r} has no comma; separate the fields by commas")
    if len(header) != len(set(header)):
        name = next(name for name in header if header.count(name) > 1)
        raise ValueError(f"the header has {name!r} twice; leave one of these columns")
    for number, row in enumerate(reader, 1):
        if None in row:
            raise ValueError(
                f"row {number} has {len(row) - 1 + len(row[None])} fields, the header {len(row) - 1}; put text with "
                "commas in double quotes"
            )
        fields = {k: v for k, v in row.items() if v not in (None, "")}
        yield {k: v if k in _TEXTS else _scalar(v) for k, v in fields.items()}


def _jsonl(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield read_object(line.strip().encode(), f"line {number}")


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} needs pyarrow, which is not installed: pip install 'megatron-dit[parquet]'"
        ) from error
    try:
        with open_binary(path) as file:
            for batch in parquet.ParquetFile(file).iter_batches():
                for row in batch.to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read {path}: {error}; correct the file") from error


def _scalar(text: str) -> Any:
    """Return a CSV field as a number if it has the usual form of one, else as text, such as `007` and `1_000`."""
    if not _NUMBER.fullmatch(text):
        return text
    if any(character in text for character in ".eE"):
        return float(text)
    return int(text) if len(text.strip()) <= LONGEST_INTEGER else text  # longer ones cannot be read
