"""`sbatch launch/train.sh` and nemo-run's Slurm executor, on a real Slurm with two nodes of one rank each."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.runs import environment, loss_values, outcome, overrides, steps_logged
from tests.slurm.cluster import Cluster, lacks, running
from tests.support.repository import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(lacks()), reason=lacks())]

STEPS = 300
FLAGS = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--time=30", "--output=job.log")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def environ(cluster: Cluster) -> dict[str, str]:
    """Return the environment of a run, with this Python and its torchrun first."""
    return environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{cluster.environ['PATH']}")


def words(run_dir: Path, **settings: Any) -> list[str]:
    quick = {"training__log_interval": 1, "logging__tensorboard": False, "training__num_steps": STEPS}
    return ["--factory", "tiny_dit", *overrides(run_dir, **{**quick, **settings})]


def sbatch(cluster: Cluster, folder: Path, *arguments: str) -> str:
    """Submit the script from a folder, and return the job's number."""
    script = str(REPOSITORY / "launch" / "train.sh")
    return cluster.command("sbatch", "--parsable", *FLAGS, script, *arguments, cwd=folder, **environ(cluster)).strip()


def ended(cluster: Cluster, number: str) -> Mapping[str, str]:
    """Wait until a job has ended for the last time (it may be requeued), and return its fields."""
    cluster.wait_for(lambda: cluster.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"))
    return cluster.job(number)


def ranks(cluster: Cluster) -> list[psutil.Process]:
    """Return the processes started by torchrun."""
    return [process for process in cluster.processes() if "LOCAL_RANK" in process.environ()]


def test_a_preempted_job_of_two_nodes_is_requeued_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm signals the job's steps as it does before the time limit; no training step is lost or repeated."""
    run_dir = tmp_path / "run"
    number = sbatch(cluster, tmp_path, *words(run_dir))
    cluster.wait_for(lambda: steps_logged(run_dir) >= 2)
    cluster.command("scancel", "--signal=USR1", number)
    cluster.wait_for(lambda: cluster.job(number)["Restarts"] == "1")
    assert (outcome(run_dir)["code"], outcome(run_dir)["reason"]) == (75, "preempted")
    assert 2 <= outcome(run_dir)["step"] < STEPS
    job = ended(cluster, number)
    log = (tmp_path / "job.log").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    assert "ended with 75; requeued" in log
    assert len(loss_values(run_dir)) == STEPS


def test_a_job_that_is_preempted_while_python_imports_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """The signal kills ranks that have no handler yet, so they leave no `exit.json`."""
    run_dir = tmp_path / "run"
    number = sbatch(cluster, tmp_path, *words(run_dir, training__num_steps=2))
    cluster.wait_for(lambda: len(ranks(cluster)) == 2)
    cluster.command("scancel", "--signal=USR1", number)
    job = ended(cluster, number)
    log = (tmp_path / "job.log").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    assert "ended with 70; requeued" in log
    assert (run_dir / f"restarts.{number}").read_text() == "1\n"
    assert outcome(run_dir)["code"] == 0


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"training__num_stepz": 3}, 2), ({"data": "energon", "data__path": "/nowhere"}, 3)],
    ids=["a misspelt setting", "no data"],
)
def test_a_job_that_must_not_run_again_ends_with_its_code(
    cluster: Cluster, tmp_path: Path, settings: dict[str, Any], code: int
) -> None:
    job = ended(cluster, sbatch(cluster, tmp_path, *words(tmp_path / "run", **settings)))
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", f"{code}:0", "0")


def test_an_experiment_of_nemo_run_trains_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """The job script is written to `job_dir`, and `sbatch` submits it from there."""
    executor = f"slurm(account='lab', job_dir='{tmp_path / 'scripts'}', nodes=2, ranks=1)"
    command = [sys.executable, "-m", "launch.experiment", "--executor", executor, "--detach", "--runs", str(tmp_path)]
    settings = ["training.num_steps=2", "logging.tensorboard=false"]
    done = subprocess.run(
        [*command, "--factory", "tiny_dit", "--name", "first", *settings],
        env={**environ(cluster), **cluster.environ, "PATH": environ(cluster)["PATH"]},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "tiny_dit.own"
    cluster.wait_for((run_dir / "exit.json").exists)
    assert (outcome(run_dir)["code"], len(loss_values(run_dir))) == (0, 2)
