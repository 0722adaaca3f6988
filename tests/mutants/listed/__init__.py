"""Mistakes that the suite must detect: one changed line each, and the tests that should fail.

Each table of this folder has the mistakes in one part of the source, one per row. Tabs separate cells, "; " separates
tests. Mistakes of public projects also have a description and the address of the public thread.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.mutants.runner import Mutant

TABLES = ("objectives", "sampling", "kernels", "layers", "parallel", "updates", "runs", "data", "commands", "shipped")


def rows_of(table: str) -> Iterator[Mutant]:
    """Yield the mutants of a table."""
    for line in Path(__file__).with_name(f"{table}.tsv").read_text().splitlines()[1:]:
        name, file, old, new, tests, *public = line.split("\t")
        yield Mutant(name, file, old, new, tuple(tests.split("; ")), *public)


MUTANTS = tuple(mutant for table in TABLES for mutant in rows_of(table))
