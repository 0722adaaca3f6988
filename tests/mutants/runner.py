"""Change one line of the source in a copy of the tree, and see which test says so."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("dit", "energon_data", "recipes", "launch", "benchmarks", "examples", "tests", "docs")
TEST_TIMEOUT_S, TIMEOUT_S = 300.0, 1800.0
"""Time limits of one test and of all tests of a mutant, which may never end."""
NO_FAILURE, FAILURES, INTERRUPTED = 0, 1, 2
"""Exit codes of pytest; the last one is that of a test file that cannot be imported."""


@dataclass(frozen=True)
class Mutant:
    """One wrong line.

    Attributes:
        name: what goes wrong.
        file: source file, from the root of the repository.
        old: text that stands in one line of the file, and nowhere else in it.
        new: what is put there instead.
        tests: test files, or tests, that should see it; the quick ones first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self, root: Path = ROOT) -> str:
        """Return the text of the changed file.

        Raises:
            ValueError: the old text is not there exactly once.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {count} times in {self.file}, not once; mend the mutant")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        seen_by: the first test that failed, without its parameters; None if all passed or ran into `TIMEOUT_S`: the
            mutant survived.
        seconds: of its tests.
    """

    seen_by: str | None
    seconds: float


def copy_tree(folder: Path, root: Path = ROOT) -> None:
    """Copy what the tests need into `folder`, to be changed there."""
    ignored = shutil.ignore_patterns("__pycache__", "*.gif", "*.png")
    for name in COPIED:
        shutil.copytree(root / name, folder / name, ignore=ignored)
    for path in root.iterdir():
        if path.is_file():
            shutil.copy(path, folder)


def judge(mutant: Mutant, tree: Path) -> Verdict:
    """Run a mutant's tests on a copied tree, which is afterwards as it was.

    Raises:
        ValueError: the mutant's line is not in the source.
        RuntimeError: pytest could not run its tests.
    """
    path, original = tree / mutant.file, (tree / mutant.file).read_text()
    path.write_text(mutant.source(tree))
    _forget_compiled(path)
    try:
        return run_tests(mutant.tests, tree)
    finally:
        path.write_text(original)
        _forget_compiled(path)


def run_tests(tests: Iterable[str], tree: Path) -> Verdict:
    """Run tests in a tree of their own, up to the first failure.

    Raises:
        RuntimeError: pytest could not run them.
    """
    started = time.monotonic()
    # Of pytest's plugins only the one that the tests' marks need: importing all of them takes seconds at each start.
    plugins = ("-p", "pytest_timeout", f"--timeout={TEST_TIMEOUT_S}", "-p", "no:cacheprovider")
    environment = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-m", "", "-x", "-rfE", "--tb=no", *plugins, *tests],
        cwd=tree,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Verdict(None, time.monotonic() - started)
    finally:
        _end_ranks(process.pid)
    seconds = time.monotonic() - started
    if process.returncode == NO_FAILURE:
        return Verdict(None, seconds)
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = [line.split()[1].partition("[")[0] for line in lines]
    if process.returncode not in (FAILURES, INTERRUPTED) or not failed:
        raise RuntimeError(f"pytest ended with {process.returncode} on {' '.join(tests)}:\n{output[-2000:]}")
    return Verdict(failed[0].removeprefix("tests/"), seconds)


def _end_ranks(session: int) -> None:
    """End what a failed test may have left running."""
    with suppress(ProcessLookupError):  # all ended by themselves
        os.killpg(session, signal.SIGKILL)


def _forget_compiled(path: Path) -> None:
    """Remove a module's bytecode: it is checked by size and whole seconds, which a mutant may leave unchanged."""
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
