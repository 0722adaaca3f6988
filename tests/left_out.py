"""Hooks of pytest that print how many tests their marks deselected, also with workers of xdist."""

from collections.abc import Sequence
from typing import Any

import pytest

LEFT_OUT = pytest.StashKey[int]()
COMMANDS = "`make test-parallel`, `test-long`, `test-faults` and `test-slurm`"
MESSAGE = "{} tests were left out by their mark: " + COMMANDS + " run the long ones"


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count deselected tests in the process that collects; a worker sends its count to the controller."""
    for item in items[:1]:
        config = item.config
        config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Read the count of a worker; the maximum, because every worker collects all tests."""
    counted = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(counted, node.config.stash.get(LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """Print the number, and the commands that run these tests."""
    if left := terminalreporter.config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(MESSAGE.format(left))
