"""Find the tests that detect known mistakes: `python -m tests.mutants [--only TEXT] [--write tests/mutants/README.md]`.

Each mutant changes one line of the source in a temporary copy of the tree; its tests run there up to the first failure.
A mutant that no test detects is a gap in the suite. All mutants take about two hours on one core. `--shipped` selects
mistakes that public projects shipped; `--write` also writes the page about them.
"""

import argparse
import ast
import functools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.listed import MUTANTS
from tests.mutants.runner import ROOT, VERIFY, Mutant, Verdict, adopt_orphans, copy_tree, judge, run_tests

PAGE, SHIPPED = ROOT / "tests/mutants/README.md", ROOT / "docs/faults-others-shipped.md"

TITLE = """# Mutants

One wrong line at a time in the core, the first test that fails because of it, and the seconds that took: CPU seconds of
all processes, and in older rows wall time. Written by `python -m tests.mutants --write tests/mutants/README.md`;
after a change of a test or a line, `--only` runs a part again.

{counts}

| mutant | line | seen by | s |
| --- | --- | --- | --- |"""
SHIPPED_TITLE = """# Faults that others shipped

This page shows which check of this project finds each fault of public trainers. A fault is listed under the first check
that fails when one changed line repeats it here, with the CPU seconds of the check. Checks are commands, which also
accept your recipe and layout, or tests (`pytest tests/CHECK`). [The list of mutants](../tests/mutants/README.md) has
the changed lines; `python -m tests.mutants --shipped --write tests/mutants/README.md` measures again.

{counts}"""
LIMIT_S = 60
NOT_RUN = "not run | |"
SURVIVED = "**SURVIVED**"


def head(mutant: Mutant) -> str:
    """Return the start of a mutant's row: its name and its change."""
    change = f"{mutant.file}: `{mutant.old}` to `{mutant.new}`".replace("|", "\\|")
    return f"| {mutant.name} | {change} | "


def row(mutant: Mutant, verdict: Verdict) -> str:
    """Return a mutant's row of the table."""
    return f"{head(mutant)}{verdict.seen_by or SURVIVED} | {verdict.seconds:.0f} |"


def exists(test: str) -> bool:
    """Return whether a file under `tests` exists and defines the class or function that `::` names.

    Commands of `launch.verify` always exist.
    """
    if test.startswith(VERIFY):
        return True
    file, *names = test.split("::")
    path = ROOT / "tests" / file
    if not path.is_file():
        return False
    body = _body(path)
    for name in names:
        definitions = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
        if not definitions:
            return False
        body = definitions[0].body
    return True


@functools.cache
def _body(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def argument_of(seen_by: str) -> str:
    """Convert the check named by a row to an argument of `run_tests`."""
    return seen_by if seen_by.startswith(VERIFY) else f"tests/{seen_by}"


def written_rows(path: Path, mutants: Sequence[Mutant] = MUTANTS) -> dict[str, str]:
    """Read the valid rows of a written table, by name of the mutant.

    A row is invalid if its mutant was not run, has changed since, or was detected by a test that no longer exists.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {}
    for mutant in mutants:
        for line in lines:
            seen_by = line.removeprefix(head(mutant)).partition(" | ")[0]
            if line.startswith(head(mutant)) and (seen_by == SURVIVED or exists(seen_by)):
                rows[mutant.name] = line
    return rows


def write(path: Path, rows: Mapping[str, str], mutants: Sequence[Mutant] = MUTANTS) -> None:
    """Write the table: survivors, mutants that were not run, and the others, each in the order of the list."""
    path.parent.mkdir(exist_ok=True)
    lines = [rows.get(mutant.name, head(mutant) + NOT_RUN) for mutant in mutants]
    survivors = [line for line in lines if SURVIVED in line]
    not_run = [line for line in lines if line.endswith(NOT_RUN)]
    seen = [line for line in lines if line not in survivors and line not in not_run]
    counts = f"{len(lines)} mutants: {len(survivors)} survived, {len(not_run)} not run, {len(seen)} seen by a test."
    path.write_text("\n".join([TITLE.format(counts=counts), *survivors, *not_run, *seen, ""]))


def shipped_page(rows: Mapping[str, str], mutants: Sequence[Mutant] = MUTANTS) -> str:
    """Return the page of mistakes that public projects shipped, from the rows of the table of all mutants."""
    faults: dict[str, list[str]] = {}
    quick = 0
    for mutant in (mutant for mutant in mutants if mutant.source):
        *_, project, _, number = mutant.source.split("/")
        result = rows.get(mutant.name, head(mutant) + NOT_RUN).removeprefix(head(mutant))
        check, _, seconds = result.removesuffix(" |").partition(" | ")
        if check != SURVIVED and seconds:
            check = f"`{'python -m ' if check.startswith(VERIFY) else ''}{check}`"
            quick += int(seconds) <= LIMIT_S
        time = f", {seconds} s" if seconds else ""
        line = f"* {mutant.fault.removesuffix('.')} ([{project} {number}]({mutant.source})){time}"
        faults.setdefault(check.removesuffix(" |"), []).append(line)
    counts = f"{sum(map(len, faults.values()))} faults, {quick} seen within {LIMIT_S} CPU seconds."
    blocks = (f"{check}:\n\n{chr(10).join(lines)}" for check, lines in faults.items())
    return "\n\n".join([SHIPPED_TITLE.format(counts=counts), *blocks]) + "\n"


def save(path: Path, rows: Mapping[str, str]) -> None:
    """Write the table, and the page of mistakes that public projects shipped if it is the table of the repository."""
    write(path, rows)
    if path.resolve() == PAGE:
        SHIPPED.write_text(shipped_page(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0 if every mutant was detected."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="mutants whose name or file contains one of these")
    parser.add_argument("--shipped", action="store_true", help="only mistakes that public projects shipped")
    parser.add_argument("--write", type=Path, help="put the rows into this Markdown table, after each mutant")
    parser.add_argument("--rest", action="store_true", help="only mutants that have no valid row in that table")
    args = parser.parse_args(argv)
    if args.rest and args.write is None:
        parser.error("--rest needs --write")
    wanted = args.only or [""]
    chosen = [mutant for mutant in MUTANTS if any(text in mutant.name + mutant.file for text in wanted)]
    chosen = [mutant for mutant in chosen if mutant.source or not args.shipped]
    if not chosen:
        parser.error("no mutant has such a name or file")
    if args.write is not None:
        save(args.write, rows := written_rows(args.write))
        chosen = [mutant for mutant in chosen if not (args.rest and mutant.name in rows)]
    survived = 0
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        passing = set()
        for mutant in chosen:
            verdict = judge(mutant, tree)
            seen_by = verdict.seen_by
            if seen_by and seen_by not in passing and run_tests([argument_of(seen_by)], tree).seen_by is not None:
                print(f"{seen_by} fails without any mutant; mend it first")
                return 2
            passing.add(seen_by)
            survived += seen_by is None
            print(row(mutant, verdict), flush=True)
            if args.write is not None:
                save(args.write, written_rows(args.write) | {mutant.name: row(mutant, verdict)})
    print(f"{len(chosen)} mutants, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
