"""Table of docs/planner.md: published steps and the planned ones.

`python -m tests.support.planner_table --write` writes the page in a minute; without `--write` it is printed.
"""

import sys
from collections.abc import Sequence
from typing import Optional

from benchmarks.planned import HEAD, ROWS, table, traced
from tests.support.generated_page import write_or_print
from tests.support.repository import REPOSITORY

PAGE = REPOSITORY / "docs" / "planner.md"


def page() -> str:
    """Return the page with the planned table."""
    before, _, after = PAGE.read_text(encoding="utf-8").partition(HEAD)
    return before + table([traced(row) for row in ROWS]) + after[after.index("\n\n") :]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    return write_or_print("tests.support.planner_table", page, PAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
