"""`benchmarks.sweep` on two gloo ranks with a valid and a refused layout, directly and as a nemo-run experiment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sweep import PLOT, ROWS
from tests.integration.runs import environment

pytestmark = pytest.mark.long
LAYOUTS = ("cp2", "pp4")


def sweep(out: Path, layouts: tuple[str, ...], *words: str) -> list[dict]:
    """Run the sweep in a separate process and return its rows."""
    grid = ["--factory", "tiny_dit", "--layouts", *layouts, "--steps", "2", "--warmup", "1", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.sweep", *grid, *words]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert (out / PLOT).stat().st_size > 5000
    return [json.loads(line) for line in (out / ROWS).read_text().splitlines()]


def test_a_local_sweep_equals_a_sweep_as_an_experiment(tmp_path):
    """Both have the same layouts, tokens and losses to the bit; only times differ. A refused layout is a row, too."""
    here = sweep(tmp_path / "here", LAYOUTS, "--ranks", "2")
    again = ("--executor", "torchrun(ranks=2)", "--folder", str(tmp_path / "nemo_run"))
    there = sweep(tmp_path / "there", LAYOUTS, *again)
    assert [row["layout"] for row in here] == list(LAYOUTS)
    assert [row["status"] for row in here] == ["ok", "refused"]
    for own, other in zip(here, there, strict=True):
        same = ("recipe", "layout", "overrides", "ranks", "status", "tokens_per_step", "loss", "parameters", "tp", "pp")
        assert {key: own.get(key) for key in same} == {key: other.get(key) for key in same}
    assert here[0]["world_size"] == 2
    assert here[0]["parameters"] > 0
