"""`sbatch launch/train.sh` from first to last step, on a substitute for Slurm (tests/support/slurm.py).

Two nodes of one rank each, which are processes on this machine. Each node starts a real torchrun.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import environment, kill_session, loss_values, outcome, overrides, steps_logged, wait_for
from tests.support import slurm

pytestmark = pytest.mark.slow
FLAGS = ("--nodes=2", "--gpus-per-node=1")


def arguments(run_dir: Path, **settings: object) -> list[str]:
    own = {"training__log_interval": 1, "logging__tensorboard": False, "training__num_steps": 400}
    return ["--factory", "tiny_dit", *overrides(run_dir, **{**own, **settings})]


def environ() -> dict[str, str]:
    """Return the environment of a run, with this Python and its torchrun first in PATH."""
    return environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def ended(job: subprocess.Popen, folder: Path) -> int:
    try:
        return job.wait(timeout=240)
    finally:
        kill_session(job)
        print((folder / "job.log").read_text()[-4000:])


def test_a_preempted_job_of_two_nodes_is_requeued_and_resumes(tmp_path):
    """The ranks receive Slurm's signal; the requeued job resumes at the next step, on one node, and exits with 0."""
    slurm.commands(tmp_path)
    run_dir = tmp_path / "run"
    job = slurm.sbatch(tmp_path, FLAGS, arguments(run_dir), environ())
    try:
        wait_for(job, lambda: steps_logged(run_dir) >= 2, tmp_path / "job.log")
        for process in slurm.tasks(tmp_path):
            os.kill(process, signal.SIGUSR1)
    finally:
        code = ended(job, tmp_path)
    assert (code, slurm.is_requeued(tmp_path), outcome(run_dir)["reason"]) == (75, True, "preempted")
    stopped = steps_logged(run_dir)
    assert 2 <= stopped < 400

    more = arguments(run_dir, training__num_steps=stopped + 2)
    again = slurm.sbatch(tmp_path, ("--nodes=1", *FLAGS[1:]), more, environ(), restarts=1)
    assert (ended(again, tmp_path), slurm.is_requeued(tmp_path)) == (0, False)
    assert len(loss_values(run_dir)) == stopped + 2
