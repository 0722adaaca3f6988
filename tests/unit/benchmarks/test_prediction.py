"""Rows of a sweep on a device that the planner knows also have the planned time of the same settings."""

import json
import sys

import pytest

from benchmarks import prediction, sweep
from dit.errors import EXIT_OK
from dit.planner.devices import H100, H200
from launch import plan

BATCH = ["training.global_batch_size=4", "training.micro_batch_size=1"]
SIZES = ["model.hidden_size=64", "model.num_layers=3", *BATCH]
SHAPE = "1x16x16"
WORDS = ["--factory", "tiny_dit", "--shape", SHAPE, *SIZES]
MEASURED = {"status": "ok", "device": "NVIDIA H200", "torch": "2", "revision": "abc", "step_ms_p50": 20.0}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GB200", "gb200"),
        ("CPU", None),
    ],
)
def test_a_device_is_known_by_its_name_unless_its_rates_differ(name, device):
    found = prediction.device_of(name)
    assert (found and found.name) == device


def test_a_prediction_is_that_of_the_plan_command():
    """`launch.plan` searches layouts; one of them is the layout of the row, which is traced at its real depth."""
    found = prediction.predicted(WORDS, 1, H100)
    args = plan.build_parser().parse_args(
        ["--factory", "tiny_dit", "--gpus", "1", "--tokens", "1x8x8", "--top", "1", *SIZES]
    )
    problem, sample = plan.problem_of(args)
    verdict = plan.searched(problem, sample).verdict
    same = [
        priced.time.total
        for priced in verdict.fitting
        if priced.candidate.micro_batch_size == 1 and priced.candidate.shape.recompute == "none"
    ]
    assert found["planned_for"] == "h100"
    assert found["planned_ms"] == pytest.approx(1e3 * min(same), rel=0.05)  # priced from two samples, not traced


def test_a_row_of_a_known_device_has_a_plan_on_its_page(tmp_path, monkeypatch):
    """The measurement is a stand-in. On a CPU, or after an error, the row has no plan."""
    record = json.dumps(MEASURED)
    code = f"import sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write({record!r} + chr(10))"
    monkeypatch.setattr(sweep, "python_command", lambda _, __, words: [sys.executable, "-c", code, *words])
    (tmp_path / "cells").mkdir()
    words = ["--factory", "tiny_dit", "--shape", SHAPE, "--layouts", "ddp", "--out", str(tmp_path), *SIZES]
    assert sweep.main(words) == EXIT_OK
    (row,) = sweep.read_rows(tmp_path / "sweep.jsonl")
    expected = prediction.predicted([*WORDS, *row["overrides"]], 1, H200)
    assert {name: row[name] for name in expected} == expected
    assert "ms, planned" in (tmp_path / "sweep.md").read_text()
    for result, says in (
        ({**MEASURED, "device": "CPU"}, {}),
        ({**MEASURED, "status": "out of memory"}, {}),
    ):
        cell = sweep.grid.Cell("tiny_dit", "ddp", "", ())
        assert sweep.planned(cell, sweep.build_parser().parse_args(words[: -len(SIZES)]), result) == says
