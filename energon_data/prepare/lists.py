"""Lists of files with one row per file: `file_name`, `caption` (or `text`, `prompt`), `label`, and others."""

import csv
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from dit.errors import ConfigError, DataError
from dit.safe_files import open_binary
from energon_data.prepare.sources import CAPTION_NAMES, leaves, read_object
from energon_data.prepare.walk import FOLLOW
from energon_data.samples import SampleError

LISTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_TEXTS = frozenset({"file_name", *CAPTION_NAMES})  # also where they spell a number


def list_stamp(folder: Path) -> Optional[list[str]]:
    """Return name and SHA-256 of the list of files that a folder has, None without one."""
    for path in (folder / name for name in LISTS):
        if path.is_file():
            with open_binary(path) as file:
                return [path.name, hashlib.file_digest(file, "sha256").hexdigest()]
    return None


def rows_of(folder: Path, follow_links: bool) -> Optional[dict[str, dict[str, Any]]]:
    """Return the rows of the first of `LISTS` by file name; None if the folder has none."""
    present = [folder / name for name in LISTS if (folder / name).is_file()]
    if not present:
        return None
    if not follow_links and leaves(present[0], folder):
        raise DataError(f"{present[0]} is a link to a file outside of {folder}; {FOLLOW}")
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
        with io.TextIOWrapper(open_binary(path), encoding="utf-8-sig", newline="") as lines:
            if path.suffix == ".csv":
                for row in csv.DictReader(lines):
                    given = {k: v for k, v in row.items() if k is not None and v not in (None, "")}
                    yield {k: v if k in _TEXTS else _scalar(v) for k, v in given.items()}
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
