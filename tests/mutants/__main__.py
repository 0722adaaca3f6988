"""Find the tests that detect known mistakes: `python -m tests.mutants [--only TEXT] [--rest] [--write]`.

Each mutant changes one line of the source in a temporary copy of the tree; its tests run there up to the first failure.
A mutant that no test detects is a gap in the suite. All mutants take about two hours on one core. `--write` stores the
results in `results.tsv` and writes the pages about them; alone, it runs no mutant.
"""

import argparse
import functools
import hashlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.listed import MUTANTS, TABLES, rows_of
from tests.mutants.runner import ROOT, VERIFY, Mutant, Verdict, adopt_orphans, copy_tree, judge, run_tests

RESULTS, PAGE = ROOT / "tests/mutants/results.tsv", ROOT / "tests/mutants/README.md"
SHIPPED = ROOT / "docs/faults-others-shipped.md"

TITLE = """# Mutants

A mutant is one wrong line in the core. The [tables](listed) have the lines and the tests that should fail;
[results.tsv](results.tsv) has the first test that failed, CPU seconds until then (in older rows wall time) and a hash
of the line.

* `python -m tests.mutants --rest --write` runs mutants without a valid result: a new or changed line, or a lost test.
* `python -m tests.mutants --only TEXT --write` runs mutants whose name or file contains a text; `--only ""` runs all.
* `python -m tests.mutants --write` runs no mutant, resolves conflicts in `results.tsv`, sorts it, and writes this page
  and [faults that others shipped](../../docs/faults-others-shipped.md). Run it after a merge.

Mutants by area:
"""
SHIPPED_TITLE = """# Faults that others shipped

Faults of public trainers, under the first check of this project that fails when [one changed
line](../tests/mutants/listed) repeats the fault here. Checks are commands, which also accept your recipe and layout, or
tests (`pytest tests/CHECK`).
`python -m tests.mutants --shipped --write` measures again.

{counts}"""
LIMIT_S = 60
NOT_RUN = "not run"
SURVIVED = "**SURVIVED**"


def hash_of(mutant: Mutant) -> str:
    """Return a short hash of a mutant's change."""
    return hashlib.sha256("\t".join((mutant.file, mutant.old, mutant.new)).encode()).hexdigest()[:8]


def row(mutant: Mutant, verdict: Verdict) -> str:
    """Return a mutant's row of `results.tsv`."""
    return "\t".join((mutant.name, verdict.seen_by or SURVIVED, f"{verdict.seconds:.0f}", hash_of(mutant)))


def exists(test: str) -> bool:
    """Return whether a file under `tests` exists and defines the classes and functions that `::` names.

    Commands of `launch.verify` always exist. Parameters in brackets are ignored.
    """
    if test.startswith(VERIFY):
        return True
    file, *names = test.partition("[")[0].split("::")
    path = ROOT / "tests" / file
    return path.is_file() and set(names) <= _definitions(path)


@functools.cache
def _definitions(path: Path) -> set[str]:
    """Return the names of all classes and functions in a file."""
    return set(re.findall(r"^ *(?:async def|def|class) (\w+)", path.read_text(), re.MULTILINE))


def arguments_of(seen_by: str, mutant: Mutant) -> list[str]:
    """Convert the check named by a row to arguments of `run_tests`; tests of the mutant may have parameters."""
    check = seen_by if seen_by.startswith(VERIFY) else f"tests/{seen_by}"
    return [test for test in mutant.tests if test.partition("[")[0] == check] or [check]


def read_results(path: Path = RESULTS, mutants: Sequence[Mutant] = MUTANTS) -> dict[str, Verdict]:
    """Read the valid results, by name of the mutant.

    A result is invalid if its mutant has changed since, or was detected by a test that no longer exists.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    # Markers of a merge conflict have fewer cells.
    stored = {(c[0], c[3]): (c[1], float(c[2])) for line in lines[1:] if len(c := line.split("\t")) == 4}
    results = {}
    for mutant in mutants:
        seen_by, seconds = stored.get((mutant.name, hash_of(mutant)), ("", 0.0))
        if seen_by == SURVIVED or exists(seen_by):
            results[mutant.name] = Verdict(None if seen_by == SURVIVED else seen_by, seconds)
    return results


def results_text(results: Mapping[str, Verdict], mutants: Sequence[Mutant] = MUTANTS) -> str:
    """Return the text of `results.tsv`, in the order of the mutants."""
    lines = [row(mutant, results[mutant.name]) for mutant in mutants if mutant.name in results]
    return "\n".join(["name\tseen by\ts\thash", *lines, ""])


def page(results: Mapping[str, Verdict]) -> str:
    """Return the page with the number of mutants of each table by result."""
    counts: dict[str, list[str]] = {}
    for area in TABLES:
        verdicts = [results.get(mutant.name) for mutant in rows_of(area)]
        states = Counter(NOT_RUN if v is None else "seen by a test" if v.seen_by else SURVIVED for v in verdicts)
        for state, count in states.items():
            counts.setdefault(state, []).append(f"{area} {count}")
    lines = [f"* {state}: {', '.join(areas)}" for state, areas in counts.items()]
    return "\n".join([TITLE, *lines, ""])


def shipped_page(results: Mapping[str, Verdict], mutants: Sequence[Mutant] = MUTANTS) -> str:
    """Return the page of mistakes that public projects shipped."""
    faults: dict[str, list[str]] = {}
    quick = 0
    for mutant in (mutant for mutant in mutants if mutant.source):
        *_, project, _, number = mutant.source.split("/")
        check = NOT_RUN
        if verdict := results.get(mutant.name):
            check = verdict.seen_by or SURVIVED
            if check != SURVIVED:
                check = f"`{'python -m ' if check.startswith(VERIFY) else ''}{check}`"
                quick += verdict.seconds <= LIMIT_S
        line = f"* {mutant.fault.removesuffix('.')} ([{project} {number}]({mutant.source}))"
        faults.setdefault(check, []).append(line)
    counts = f"{sum(map(len, faults.values()))} faults, {quick} seen within {LIMIT_S} CPU seconds."
    blocks = (f"{check}:\n\n{chr(10).join(lines)}" for check, lines in faults.items())
    return "\n\n".join([SHIPPED_TITLE.format(counts=counts), *blocks]) + "\n"


def texts(results: Mapping[str, Verdict]) -> dict[Path, str]:
    """Return the texts of the files that `--write` writes."""
    return {RESULTS: results_text(results), PAGE: page(results), SHIPPED: shipped_page(results)}


def save(results: Mapping[str, Verdict]) -> None:
    """Write the results and the pages about them."""
    for path, text in texts(results).items():
        path.write_text(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0 if every mutant was detected."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="mutants whose name or file contains one of these")
    parser.add_argument("--shipped", action="store_true", help="only mistakes that public projects shipped")
    parser.add_argument("--write", action="store_true", help="write results.tsv and the pages; alone, run no mutant")
    parser.add_argument("--rest", action="store_true", help="only mutants that have no valid result")
    args = parser.parse_args(argv)
    wanted = args.only or [""]
    chosen = [mutant for mutant in MUTANTS if any(text in mutant.name + mutant.file for text in wanted)]
    chosen = [mutant for mutant in chosen if mutant.source or not args.shipped]
    if not chosen:
        parser.error("no mutant has such a name or file")
    results = read_results()
    if args.rest:
        chosen = [mutant for mutant in chosen if mutant.name not in results]
    if args.write:
        save(results)
        chosen = chosen if args.rest or args.only or args.shipped else []
    survived = 0
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        passing: set[tuple[str, ...]] = set()
        for mutant in chosen:
            verdict = judge(mutant, tree)
            seen_by = verdict.seen_by
            checks = tuple(arguments_of(seen_by, mutant)) if seen_by else ()
            if checks and checks not in passing and run_tests(checks, tree).seen_by is not None:
                print(f"{seen_by} fails without any mutant; mend it first")
                return 2
            passing.add(checks)
            survived += seen_by is None
            print(row(mutant, verdict), flush=True)
            if args.write:
                save(read_results() | {mutant.name: verdict})
    print(f"{len(chosen)} mutants, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
