"""The time model compared with published measurements, including systems left out of its fit."""

from dataclasses import asdict
from statistics import median

import pytest

from benchmarks.planned import ROWS, fitted, left_out, table, traced
from dit.planner.devices import Fitted
from tests.support.planner_table import PAGE

pytestmark = pytest.mark.long

MEDIAN, LARGEST, SEEN = 0.10, 0.20, 0.07


@pytest.fixture(scope="module")
def rows():
    return [traced(row) for row in ROWS]


def test_one_set_of_constants_predicts_the_published_rows(rows):
    for row in rows:
        assert abs(row.error(Fitted())) < SEEN or not row.row.fitted, row.row.name


def test_the_fit_predicts_the_rows_of_another_system(rows):
    systems = {row.row.system for row in rows if row.row.fitted}
    unseen = {system: left_out(rows, system) for system in systems}
    errors = [abs(row.error(unseen[row.row.system])) for row in rows if row.row.fitted]
    assert median(errors) < MEDIAN
    assert max(errors) < LARGEST


def test_the_constants_equal_those_of_the_fit(rows):
    best = fitted([row for row in rows if row.row.fitted])
    assert asdict(best) == pytest.approx(asdict(Fitted()), rel=0.02)


def test_the_page_has_the_planned_table(rows):
    """If not: `python -m tests.support.planner_table --write`."""
    assert table(rows) in PAGE.read_text(encoding="utf-8")
