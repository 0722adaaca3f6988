"""Lists of files: captions, classes and more for the files of a folder, one row each.

    metadata.jsonl  .csv  .parquet    `file_name`, `caption` (or `text`, `prompt`), `label`, and others; `start` and
                                      `end` in seconds make a clip of a video, which may have several such rows
    Train_GCC-training.tsv            Conceptual Captions: caption TAB URL, without a header; row 0 is that of 0.jpg,
                                      000000000.jpg or 0_name.jpg

A file of the folder that its list does not name is skipped.
"""

import csv
import hashlib
import io
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from dit.errors import ConfigError, DataError
from dit.safe_files import open_binary
from energon_data.prepare.sources import CAPTION_NAMES, leaves, read_object
from energon_data.prepare.walk import FOLLOW, Skipped
from energon_data.samples import SampleError

LISTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
KINDS = (".jsonl", ".csv", ".parquet", ".tsv")
Rows = dict[str, list[dict[str, Any]]]
"""Rows by file name; several only of a video, each with another start or end."""
_TEXTS = frozenset({"file_name", "file", *CAPTION_NAMES})  # also where they spell a number
_ROW_NUMBER = re.compile(r"(\d+)(\D.*)?")


def find_list(folder: Path, named: Optional[Path] = None, *, follow_links: bool = False) -> Optional[Path]:
    """Return the list of files to read: the one that the user names, else the first of `LISTS` in the folder, or None.

    Raises:
        ConfigError: there is no such list, or it is of another kind than `KINDS`.
        DataError: the list in the folder is a link that leads out of it.
    """
    if named is not None:
        if not named.is_file():
            raise ConfigError(f"--list {named} does not exist; name a file of rows, one for each picture or clip")
        if named.suffix not in KINDS:
            raise ConfigError(f"--list {named} must end in {', '.join(KINDS)}")
        return named
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


def read_list(path: Path, names: Collection[str]) -> tuple[Rows, list[Skipped]]:
    """Return the rows of a list by file name, and what it says of files that do not exist.

    Args:
        names: files of the folder. Rows of a `.tsv` are found by their numbers; other lists name their files.

    Raises:
        DataError: the list cannot be read, or a row names no file inside the folder, or one that another row names.
    """
    if path.suffix == ".tsv":
        return _numbered_rows(path, names)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for number, row in enumerate(_parsed(path), 1):
        if "file_name" not in row and "file" in row:
            row["file_name"] = row.pop("file")
        name = row.get("file_name")
        if not isinstance(name, str) or not name:
            hint = "" if "file_name" in row else f" among {', '.join(row) or 'no entries'}"
            raise DataError(
                f"{path}, row {number}: file_name is {name!r}{hint}; name a file relative to --in (`prepare "
                "huggingface` reads pictures inside of parquet files)"
            )
        if name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name:
            raise DataError(f"{path}, row {number}: file_name {name!r} leaves the folder; name files inside it")
        name = str(PurePosixPath(name))
        span = "" if row.get("start") is None and row.get("end") is None else f"{row.get('start')} to {row.get('end')}"
        others = rows.setdefault(name, {})
        if others and ("" in others or span == "" or span in others):
            part = f", {span}," if span else ""
            raise DataError(
                f"{path}, row {number}: {name!r}{part} is listed twice; leave one row, or give each clip of a video a "
                "start and an end of its own"
            )
        others[span] = row
    return {name: list(of_file.values()) for name, of_file in rows.items()}, []


def _numbered_rows(path: Path, names: Collection[str]) -> tuple[Rows, list[Skipped]]:
    """Return the rows of Conceptual Captions by the numbers with which the names of files begin."""
    by_number: dict[int, str] = {}
    for name in sorted(names):
        match = _ROW_NUMBER.fullmatch(PurePosixPath(name).stem)
        if match is None:
            continue
        number = int(match[1])
        if number in by_number:
            raise DataError(f"{by_number[number]} and {name} both have the number {number}, of one row of {path}")
        by_number[number] = name
    rows: Rows = {}
    count = 0
    with _opened(path) as lines:
        for number, fields in enumerate(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)):
            count = number + 1
            is_url = [field.startswith(("http://", "https://")) for field in fields[:2]]
            if sum(is_url) != 1:
                raise DataError(
                    f"{path}, row {number}: {fields[:2]!r:.120} is no caption and URL with a tab between them; other "
                    "lists are .csv or .jsonl with file_name and text"
                )
            if number in by_number:
                rows[by_number[number]] = [{"caption": fields[is_url.index(False)], "url": fields[is_url.index(True)]}]
    beyond = [name for number, name in by_number.items() if number >= count]
    if beyond:
        raise DataError(
            f"{beyond[0]} has no row in {path}, whose rows have the numbers 0 to {count - 1}; rename files that are "
            "counted from 1, or each has the caption of another"
        )
    missing = SampleError("not_a_file", f"{count - len(rows):,} of {count:,} rows have no picture in the folder")
    return rows, [Skipped.of(path.name, missing)] if len(rows) < count else []


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    """Open a list; what is wrong with its content is raised as `DataError`."""
    try:
        with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline="") as lines:
            yield lines
    except DataError:
        raise
    except (OSError, ValueError, csv.Error, SampleError) as error:
        detail = error.detail if isinstance(error, SampleError) else str(error)
        raise DataError(f"cannot read {path}: {detail}; correct the file") from error


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    with _opened(path) as lines:
        if path.suffix == ".csv":
            for row in csv.DictReader(lines):
                given = {k: v for k, v in row.items() if k is not None and v not in (None, "")}
                yield {k: v if k in _TEXTS else _scalar(v) for k, v in given.items()}
            return
        for line in lines:
            if line.strip():
                yield read_object(line.encode(), path.name)


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
