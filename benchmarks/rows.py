"""Rows of measurements: files of JSON lines, and tables in Markdown."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from dit.safe_files import parse_json, read_bytes


def append(out: Optional[Path], row: Mapping[str, Any]) -> None:
    """Append a row to a file of JSON lines; None writes nothing."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; an incomplete last line is ignored, and a missing file has none."""
    if not path.exists():
        return []
    complete = read_bytes(path).rpartition(b"\n")[0]
    return [parse_json(line) for line in complete.splitlines()]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """Return a table in Markdown; the last columns have numbers, which are right-aligned."""
    lines = (heads, ["---"] * (len(heads) - numbers) + ["---:"] * numbers, *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
