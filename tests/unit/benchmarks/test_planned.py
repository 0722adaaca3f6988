"""Planned times beside published ones; all rows are in tests/integration/test_planned_rows.py."""

from dataclasses import dataclass, replace

import pytest

from benchmarks.planned import ROWS, fitted, traced
from dit.planner.devices import H100, Device

PUBLISHED = 0.07


@dataclass
class Made:
    """A row whose time is known to follow from two rates."""

    matmul: float
    attention: float
    seconds: float

    def error(self, device: Device) -> float:
        return (self.matmul / device.matmul_flops + self.attention / device.attention_flops) / self.seconds - 1


def test_a_fit_finds_the_rates_that_made_the_rows():
    truth = replace(H100, matmul_flops=500e12, attention_flops=300e12)
    work = [(4e15, 1e15), (1e15, 3e15), (2e15, 2e15)]
    rows = [Made(a, b, a / truth.matmul_flops + b / truth.attention_flops) for a, b in work]
    found = fitted(rows)
    assert found.matmul_flops == pytest.approx(truth.matmul_flops, rel=1e-6)
    assert found.attention_flops == pytest.approx(truth.attention_flops, rel=1e-6)
    assert found.memory_bandwidth == H100.memory_bandwidth


def test_the_row_that_most_cite_is_planned_within_seven_percent():
    row = traced(ROWS[0])
    assert row.measured == pytest.approx(256 * 8192 / (256 * 10_052))
    assert abs(row.error(H100)) < PUBLISHED
