"""Every mutant fits the source; running one reports whether tests detect it, and restores the source."""

import ast
import re
from collections import Counter
from functools import cache

import pytest

from tests.mutants import runner
from tests.mutants.__main__ import PAGE, SHIPPED, exists, row, shipped_page, write, written_rows
from tests.mutants.listed import MUTANTS
from tests.mutants.runner import ROOT, VERIFY, Mutant, Verdict, judge


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def statement_at(line: int, module: ast.Module) -> ast.stmt:
    return next(statement for statement in module.body if statement.end_lineno >= line)


def lines_of(statement: ast.stmt) -> slice:
    """Return the lines of a statement of a module, with its decorators."""
    first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", ())))
    return slice(first - 1, statement.end_lineno)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_changes_one_line_of_the_source(mutant):
    """The changed statement parses as Python, and differs from the original."""
    assert "\n" not in mutant.old + mutant.new
    text = (ROOT / mutant.file).read_text()
    before = statement_at(text[: text.find(mutant.old)].count("\n") + 1, parsed(mutant.file))
    (after,) = ast.parse("\n".join(mutant.changed().split("\n")[lines_of(before)])).body
    assert ast.dump(before) != ast.dump(after)
    assert [test for test in mutant.tests if not exists(test.removeprefix("tests/"))] == []


def test_mutants_have_distinct_names():
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert len(MUTANTS) >= 60


def test_the_page_has_one_row_for_each_mutant_and_names_tests_that_exist(tmp_path):
    """If not: `python -m tests.mutants --rest --write tests/mutants/README.md`."""
    rows = written_rows(PAGE)
    assert [mutant.name for mutant in MUTANTS if mutant.name not in rows] == []
    write(tmp_path / "README.md", rows)
    assert PAGE.read_text() == (tmp_path / "README.md").read_text()


def test_every_shipped_mistake_has_a_distinct_sentence_and_public_thread():
    shipped = [mutant for mutant in MUTANTS if mutant.source or mutant.fault]
    thread = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+")
    assert [mutant.name for mutant in shipped if not thread.fullmatch(mutant.source)] == []
    assert [mutant.name for mutant in shipped if not re.fullmatch(r"[A-Z][^|]+\.", mutant.fault)] == []
    assert len({mutant.source for mutant in shipped}) == len(shipped) >= 20


def test_the_page_of_shipped_mistakes_has_the_rows_of_the_table():
    """If not: `python -m tests.mutants --rest --write tests/mutants/README.md`."""
    assert SHIPPED.read_text() == shipped_page(written_rows(PAGE))


def test_the_page_of_shipped_mistakes_counts_mistakes_detected_in_time():
    fault, source = "It doubles.", "https://github.com/some/project/issues/"
    names = "within", "late", "unseen", "not run"
    mutants = [Mutant(name, "double.py", "x", "y", (), fault, f"{source}{i}") for i, name in enumerate(names)]
    command = f"{VERIFY}--factory tiny_dit"
    verdicts = Verdict(command, 60.4), Verdict(command, 61.0), Verdict(None, 3.0)
    rows = {mutant.name: row(mutant, verdict) for mutant, verdict in zip(mutants, verdicts)}
    page = shipped_page(rows, [*mutants, Mutant("of ours", "double.py", "x", "z", ())])
    assert "4 faults, 1 seen within 60 CPU seconds" in page
    lines = [line for line in page.splitlines() if line]
    assert lines[-7:] == [
        "`python -m launch.verify --factory tiny_dit`:",
        f"* It doubles ([project 0]({source}0)), 60 s",
        f"* It doubles ([project 1]({source}1)), 61 s",
        "**SURVIVED**:",
        f"* It doubles ([project 2]({source}2)), 3 s",
        "not run:",
        f"* It doubles ([project 3]({source}3))",
    ]


def test_a_mutant_is_detected_or_survives_and_the_tree_is_restored(tmp_path, monkeypatch):
    """Also if both sources have the same size and time stamp: stale bytecode must not run."""
    monkeypatch.setattr(runner, "TEST_TIMEOUT_S", 2.0)
    source = tmp_path / "double.py"
    source.write_text("def double(x):\n    return x + x\n\n\ndef half(x):\n    return x / 2\n")
    (tmp_path / "test_double.py").write_text(
        "from double import double\n\n\ndef test_it():\n    assert double(3) == 6\n"
    )
    before = source.read_text()
    wrong = Mutant("wrong", "double.py", "x + x", "x - x", ("test_double.py",))
    unseen = Mutant("unseen", "double.py", "x / 2", "x / 3", ("test_double.py",))
    broken = Mutant("broken", "double.py", "def double(x)", "def doubled(x)", ("test_double.py",))
    endless = Mutant("endless", "double.py", "return x + x", "return sum(1 for _ in iter(int, 1))", ("test_double.py",))
    seen = [judge(mutant, tmp_path).seen_by for mutant in (wrong, unseen, broken, endless)]
    assert seen == ["test_double.py::test_it", None, "test_double.py", "test_double.py::test_it"]
    assert source.read_text() == before
    with pytest.raises(ValueError, match="0 times"):
        judge(Mutant("gone", "double.py", "x * 2", "x * 3", ("test_double.py",)), tmp_path)


def test_the_table_lists_survivors_first_and_keeps_rows_until_their_mutant_changes(tmp_path):
    a, b, c = (Mutant(name, "double.py", "x | 1", "x + 1", ()) for name in "abc")
    path = tmp_path / "table.md"
    test = "unit/test_mutants.py::test_mutants_have_distinct_names"
    rows = {"a": row(a, Verdict(test, 1.4)), "c": row(c, Verdict(None, 2.0))}
    write(path, rows, (a, b, c))
    assert path.read_text().splitlines()[-3:] == [
        "| c | double.py: `x \\| 1` to `x + 1` | **SURVIVED** | 2 |",
        "| b | double.py: `x \\| 1` to `x + 1` | not run | |",
        f"| a | double.py: `x \\| 1` to `x + 1` | {test} | 1 |",
    ]
    assert "3 mutants: 1 survived, 1 not run, 1 seen by a test" in path.read_text()
    assert written_rows(path, (a, b, c)).keys() == {"a", "c"}
    changed = Mutant("a", "double.py", "x | 1", "x + 2", ())
    assert written_rows(path, (changed, b)) == {}
    for renamed in ("unit/test_mutants.py::test_that_was_renamed", "unit/renamed.py"):
        write(path, {"a": row(a, Verdict(renamed, 1.4))}, (a,))
        assert written_rows(path, (a,)) == {}
