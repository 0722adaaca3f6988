"""A grid as a nemo-run experiment on this machine, and nemo-run's command with our recipes; exit codes are correct."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dit.errors import EXIT_OK, EXIT_UNEXPECTED
from tests.integration.runs import environment, loss_values, outcome

pytestmark = pytest.mark.slow


def ended(*command: str, **environ: str) -> subprocess.CompletedProcess:
    """Run a command to its end, and print its output."""
    done = subprocess.run(
        command, env=environment(**environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout[-3000:])
    return done


def test_a_grid_runs_to_its_end_and_fails_if_one_run_does(tmp_path):
    """The folder of the first run is a file and the second run still trains; the command fails and names the first."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny_dit.distopt").touch()
    done = ended(
        *(sys.executable, "-m", "launch.experiment", "--executor", "torchrun(ranks=1)"),
        *("--folder", str(tmp_path / "nemo_run"), "--runs", str(tmp_path / "runs")),
        *("--factory", "tiny_dit", "--layouts", "distopt", "ddp", "training.num_steps=3"),
    )
    assert done.returncode == EXIT_UNEXPECTED
    assert "1 of 2 runs did not succeed: tiny_dit.distopt" in done.stdout
    assert outcome(tmp_path / "runs" / "tiny_dit.ddp")["code"] == EXIT_OK
    assert len(loss_values(tmp_path / "runs" / "tiny_dit.ddp")) == 3


@pytest.fixture
def entry_point(tmp_path) -> str:
    """Return a path with a folder that declares our entry point as an installed copy does."""
    folder = tmp_path / "site" / "entry_point_of_this_tree-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-point-of-this-tree\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[nemo_run.cli]\ndit = launch.nemorun\n")
    return f"{folder.parent}{os.pathsep}{environment()['PYTHONPATH']}"


def test_the_command_of_nemo_run_trains_recipes(tmp_path, entry_point):
    """`nemorun dit pretrain` takes recipe, settings and a part by name; mistakes exit with 1, nemo-run's only code."""
    nemorun = [str(Path(sys.executable).parent / "nemorun"), "dit", "pretrain", "--factory", "tiny_dit", "--yes"]
    words = [f"training.run_dir={tmp_path / 'run'}", "training.num_steps=3", "objective=edm"]
    environ = {"PYTHONPATH": entry_point, "NEMORUN_HOME": str(tmp_path)}
    assert ended(*nemorun, *words, **environ).returncode == 0
    assert outcome(tmp_path / "run")["code"] == EXIT_OK
    assert "dit.objectives.edm.EDM" in (tmp_path / "run" / "config.yaml").read_text()
    assert ended(*nemorun, *words, "training.num_stepz=3", **environ).returncode == 1
