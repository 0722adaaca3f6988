"""Which rows of the parallel suite run: a few of every kind in `make test`, all of them in `make test-parallel`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def rows(cases: Iterable[tuple], quick: Callable[..., bool]) -> list[Any]:
    """Mark the cases that only the full suite runs."""
    return [pytest.param(*case, marks=() if quick(*case) else pytest.mark.matrix) for case in cases]


def selected(request: pytest.FixtureRequest, names: tuple[str, ...]) -> set[tuple]:
    """Return the values of these parameters in all tests of the asking module that this start of pytest will run."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return {tuple(call.params[n] for n in names) for call in calls if call and call.params.keys() >= set(names)}
