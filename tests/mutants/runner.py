"""Change one line in a copy of the source, and find the first test or check of `launch.verify` that fails."""

import ctypes
import importlib.util
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dit.errors import EXIT_OK, EXIT_UNEXPECTED

ROOT = Path(__file__).parents[2]
COPIED = ("dit", "energon_data", "recipes", "launch", "benchmarks", "examples", "tests", "docs")
TEST_TIMEOUT_S, TIMEOUT_S = 300.0, 1800.0
"""Time limits of one test and of all tests of a mutant, because a mutant may hang."""
NO_FAILURE, FAILURES, INTERRUPTED = 0, 1, 2
"""Exit codes of pytest; `INTERRUPTED` if a test file cannot be imported."""
VERIFY = "launch.verify "
"""Prefix of a check that is a command of `launch.verify` and not a test."""


@dataclass(frozen=True)
class Mutant:
    """One wrong line.

    Attributes:
        name: description of the fault.
        file: source file, from the root of the repository.
        old: text within one line, exactly once in the file.
        new: replacement of the text.
        tests: test files, tests or commands of `launch.verify` that should fail; quick ones first.
        fault: the same mistake in a public project, in one sentence; empty if none is known.
        source: address of the public thread about it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    fault: str = ""
    source: str = ""

    def changed(self, root: Path = ROOT) -> str:
        """Return the text of the changed file.

        Raises:
            ValueError: the old text does not occur exactly once.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {count} times in {self.file}, not once; mend the mutant")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """Result of the tests of a mutant.

    Attributes:
        seen_by: the first test that failed, without its parameters; None if all passed or timed out, so
            that the mutant survived.
        seconds: CPU seconds of its tests, in all processes.
    """

    seen_by: str | None
    seconds: float


def copy_tree(folder: Path, root: Path = ROOT) -> None:
    """Copy the source and the tests into `folder`, where mutants change them."""
    ignored = shutil.ignore_patterns("__pycache__", "*.gif", "*.png")
    for name in COPIED:
        shutil.copytree(root / name, folder / name, ignore=ignored)
    for path in root.iterdir():
        if path.is_file():
            shutil.copy(path, folder)


def judge(mutant: Mutant, tree: Path) -> Verdict:
    """Run the tests of a mutant on a copied tree, and restore the tree afterwards.

    Raises:
        ValueError: the mutant's line is not in the source.
        RuntimeError: pytest could not run its tests.
    """
    path, original = tree / mutant.file, (tree / mutant.file).read_text()
    path.write_text(mutant.changed(tree))
    _forget_compiled(path)
    try:
        return run_tests(mutant.tests, tree)
    finally:
        path.write_text(original)
        _forget_compiled(path)


def run_tests(tests: Iterable[str], tree: Path) -> Verdict:
    """Run tests or commands of `launch.verify` in a copied tree, up to the first failure.

    Raises:
        RuntimeError: a test or command could not run.
    """
    tests, before = list(tests), _cpu_seconds()
    commands = [test for test in tests if test.startswith(VERIFY)]
    files = [test for test in tests if test not in commands]
    seen_by = next(filter(lambda command: _verify_differs(command, tree), commands), None)
    if seen_by is None and files:
        seen_by = _first_failure(files, tree)
    return Verdict(seen_by, _cpu_seconds() - before)


def _verify_differs(command: str, tree: Path) -> bool:
    code, output = _run(shlex.split(command), tree)
    is_complete = output.rstrip().rpartition("\n")[2].startswith("in ")  # its last line is the duration
    if code not in (EXIT_OK, EXIT_UNEXPECTED, None) or (code == EXIT_UNEXPECTED and not is_complete):
        raise RuntimeError(f"{command} ended with {code}:\n{output[-2000:]}")
    return code == EXIT_UNEXPECTED


def _first_failure(files: Sequence[str], tree: Path) -> str | None:
    # Load only the plugin that the marks require, because importing all plugins takes seconds at each start.
    plugins = ("-p", "pytest_timeout", f"--timeout={TEST_TIMEOUT_S}", "-p", "no:cacheprovider")
    code, output = _run(["pytest", "-m", "", "-x", "-rfE", "--tb=no", *plugins, *files], tree)
    if code in (NO_FAILURE, None):
        return None
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = [line.split()[1].partition("[")[0] for line in lines]
    if code not in (FAILURES, INTERRUPTED) or not failed:
        raise RuntimeError(f"pytest ended with {code} on {' '.join(files)}:\n{output[-2000:]}")
    return failed[0].removeprefix("tests/")


def _run(module: Sequence[str], tree: Path) -> tuple[int | None, str]:
    """Run a Python module with arguments; return the exit code (None after `TIMEOUT_S`) and the output."""
    environment = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        cwd=tree,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        _end_ranks(process.pid)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned ranks, so that it counts their CPU time."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _end_ranks(session: int) -> None:
    """Kill processes that a failed test left running, and wait for them."""
    with suppress(ProcessLookupError):  # all have exited
        os.killpg(session, signal.SIGKILL)
    with suppress(ChildProcessError):  # none is left
        while True:
            os.waitpid(-session, 0)


def _forget_compiled(path: Path) -> None:
    """Remove the bytecode of a module: Python compares size and full seconds, which a mutant may not change."""
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
