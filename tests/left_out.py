"""Hooks of pytest: say aloud how many tests were left out by their mark, also where xdist's workers collect them."""

from collections.abc import Sequence
from typing import Any

import pytest

LEFT_OUT = pytest.StashKey[int]()
MESSAGE = "{} tests were left out by their mark: `make test-parallel`, `test-faults` and `test-slurm` run the long ones"


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count them where they are collected; a worker sends its count to the process that reports."""
    for item in items[:1]:
        config = item.config
        config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the count of a worker; each of them collects all tests."""
    counted = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(counted, node.config.stash.get(LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """Say the number, and how they are run."""
    if left := terminalreporter.config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(MESSAGE.format(left))
