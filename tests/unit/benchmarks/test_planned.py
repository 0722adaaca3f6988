"""The fit of constants, and one published row; all rows are in tests/long/test_planned_rows.py."""

from dataclasses import dataclass, replace

import pytest

from benchmarks.planned import ROWS, fitted, traced
from dit.planner.devices import Fitted
from tests.support.planner_table import PAGE

PUBLISHED = 0.07


@dataclass
class Synthetic:
    """A row whose time follows from two rates."""

    matmul: float
    attention: float
    seconds: float

    def error(self, constants: Fitted) -> float:
        planned = self.matmul / constants.hopper_matmul + self.attention / constants.hopper_attention
        return planned / self.seconds - 1


def test_a_fit_finds_the_rates_of_the_rows_and_keeps_other_constants():
    truth = replace(Fitted(), hopper_matmul=600e12, hopper_attention=400e12)
    work = [(4e15, 1e15), (1e15, 3e15), (2e15, 2e15)]
    rows = [Synthetic(a, b, a / truth.hopper_matmul + b / truth.hopper_attention) for a, b in work]
    found = fitted(rows)
    assert found.hopper_matmul == pytest.approx(truth.hopper_matmul, rel=0.01)  # because of a penalty
    assert found.hopper_attention == pytest.approx(truth.hopper_attention, rel=0.01)
    assert found.blackwell_matmul == pytest.approx(Fitted().blackwell_matmul)


def test_the_page_has_every_published_row():
    """If not: `python -m tests.support.planner_table --write`."""
    page = PAGE.read_text(encoding="utf-8")
    assert [row.cells for row in ROWS if page.count(row.cells) != 1] == []


def test_a_published_row_of_nemo_is_planned_within_seven_percent():
    row = traced(ROWS[0])
    assert row.row.seconds == pytest.approx(256 * 8192 / (256 * 10_052))
    assert abs(row.error(Fitted())) < PUBLISHED
