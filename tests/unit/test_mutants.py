"""Every mutant fits the source; running one reports whether tests detect it, and restores the source."""

import ast
import re
from collections import Counter
from functools import cache

import pytest

from tests.mutants import runner
from tests.mutants.__main__ import exists, read_results, results_text, texts
from tests.mutants.listed import MUTANTS
from tests.mutants.runner import ROOT, Mutant, Verdict, judge


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def statement_at(line: int, node: ast.AST) -> ast.AST:
    """Return the innermost statement at a line; a decorator belongs to no statement inside the node."""
    blocks = (getattr(node, name, ()) for name in ("body", "orelse", "handlers", "finalbody"))
    children = (child for block in blocks for child in block if child.lineno <= line <= child.end_lineno)
    return next((statement_at(line, child) for child in children), node)


def lines_at(line: int, module: ast.Module) -> slice:
    """Return the lines of the statement of a module that ends at or after a line, with its decorators."""
    statement = next(statement for statement in module.body if statement.end_lineno >= line)
    first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", ())))
    return slice(first - 1, statement.end_lineno)


def test_every_mutant_changes_one_line_of_the_source():
    """The changed statement parses as Python, and differs from the original."""
    for mutant in MUTANTS:
        assert "\n" not in mutant.old + mutant.new, mutant.name
        text = (ROOT / mutant.file).read_text()
        line = text[: text.find(mutant.old)].count("\n") + 1
        lines = lines_at(line, parsed(mutant.file))
        before, after = (ast.parse("\n".join(x.split("\n")[lines])) for x in (text, mutant.changed()))
        assert len(after.body) == 1, mutant.name
        before, after = (statement_at(line - lines.start, module) for module in (before, after))
        assert ast.dump(before) != ast.dump(after), mutant.name
        assert [test for test in mutant.tests if not exists(test.removeprefix("tests/"))] == [], mutant.name


def test_mutants_have_distinct_names():
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert len(MUTANTS) >= 60


def test_every_mutant_has_a_result_that_names_a_test_and_the_pages_have_the_results():
    """If not: `python -m tests.mutants --rest --write`; after a merge, `--write` is enough."""
    results = read_results()
    assert [mutant.name for mutant in MUTANTS if mutant.name not in results] == []
    for path, text in texts(results).items():
        assert path.read_text() == text, path


def test_results_are_read_from_both_sides_of_a_conflict_unless_the_mutant_or_its_test_changed(tmp_path):
    path, file = tmp_path / "results.tsv", "unit/test_mutants.py"
    mutants = [Mutant(name, file, "old", "new", ()) for name in ("survived", "changed", "seen", "lost")]
    results = {name: Verdict(file, 1) for name in ("changed", "seen")}
    results |= {"survived": Verdict(None, 7), "lost": Verdict(f"{file}::test_x", 1)}
    title, survived, *others = results_text(results, mutants).splitlines()
    path.write_text("\n".join([title, "<<<<<<< HEAD", *others, "=======", survived, ">>>>>>> branch"]))
    mutants[1] = Mutant("changed", file, "old", "newer", ())
    assert read_results(path, mutants) == {"survived": Verdict(None, 7), "seen": Verdict(file, 1)}


def test_every_shipped_mistake_has_a_distinct_sentence_and_public_thread():
    shipped = [mutant for mutant in MUTANTS if mutant.source or mutant.fault]
    thread = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+")
    assert [mutant.name for mutant in shipped if not thread.fullmatch(mutant.source)] == []
    assert [mutant.name for mutant in shipped if not re.fullmatch(r"[A-Z][^|]+\.", mutant.fault)] == []
    assert len({mutant.source for mutant in shipped}) == len(shipped) >= 20


def test_a_mutant_is_detected_or_survives_and_the_tree_is_restored(tmp_path, monkeypatch):
    """Also if both sources have the same size and time stamp: stale bytecode must not run."""
    monkeypatch.setattr(runner, "TEST_TIMEOUT_S", 1.0)
    source = tmp_path / "double.py"
    source.write_text("def double(x):\n    return x + x\n\n\ndef half(x):\n    return x / 2\n")
    (tmp_path / "test_double.py").write_text(
        "from double import double\n\n\ndef test_it():\n    assert double(3) == 6\n"
    )
    before = source.read_text()
    wrong = Mutant("wrong", "double.py", "x + x", "x - x", ("test_double.py",))
    unseen = Mutant("unseen", "double.py", "x / 2", "x / 3", ("test_double.py",))
    broken = Mutant("broken", "double.py", "def double(x)", "def doubled(x)", ("test_double.py",))
    endless = Mutant("endless", "double.py", "return x + x", "import time; time.sleep(99)", ("test_double.py",))
    seen = [judge(mutant, tmp_path).seen_by for mutant in (wrong, unseen, broken, endless)]
    assert seen == ["test_double.py::test_it", None, "test_double.py", "test_double.py::test_it"]
    assert source.read_text() == before
    with pytest.raises(ValueError, match="0 times"):
        judge(Mutant("gone", "double.py", "x * 2", "x * 3", ("test_double.py",)), tmp_path)
