"""A substitute for Slurm: `sbatch`, `srun` and `scontrol` that follow the script's directives on this machine.

Nodes are processes, all named `localhost`. A job that requeues itself runs again, as in Slurm.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.repository import REPOSITORY

SCRIPT = REPOSITORY / "launch" / "train.sh"
JOB_ID = 4711

SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words and words[0].startswith("--"):
    words.pop(0)
nodes = range(int(os.environ["SLURM_NNODES"]))
tasks = [subprocess.Popen(words, env={{**os.environ, "SLURM_NODEID": str(i)}}) for i in nodes]
with open("{folder}/tasks", "w") as file:
    print(*(task.pid for task in tasks), file=file)
codes = [task.wait() for task in tasks]
os.unlink("{folder}/tasks")
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
"""Starts the command once per node, writes the process ids to `tasks`, and returns the highest exit code."""

SCONTROL = """#!/bin/bash
task=$SLURM_JOB_ID
[[ -z $SLURM_ARRAY_JOB_ID ]] || task=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
case "$1 $2" in
  "show hostnames") for ((i = 0; i < SLURM_NNODES; i++)); do echo localhost; done ;;
  "requeue $task") echo requeued >>"{folder}/requeued" ;;
  *) exit 1 ;;
esac
"""


def commands(folder: Path, **more: str) -> Path:
    """Write `srun`, `scontrol` and further programs (name to text) into `folder/bin`; return that folder."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, **more}.items():
        (bin_folder / name).write_text(text.format(python=sys.executable, folder=folder))
        (bin_folder / name).chmod(0o755)
    return bin_folder


def directives(flags: Sequence[str] = ()) -> dict[str, str]:
    """Return the script's directives for Slurm; flags of sbatch's command line take precedence."""
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", SCRIPT.read_text(), re.MULTILINE)
    return dict(lines) | dict(flag.removeprefix("--").split("=", 1) for flag in flags)


def environment(options: Mapping[str, str], restarts: int) -> dict[str, str]:
    """Return the variables that Slurm sets for a job with these directives."""
    return {
        "SLURM_JOB_ID": str(JOB_ID),
        "SLURM_NNODES": options["nodes"],
        "SLURM_JOB_NODELIST": f"node[1-{options['nodes']}]",
        "SLURM_GPUS_ON_NODE": options["gpus-per-node"],
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_RESTART_COUNT": str(restarts),
    }


def sbatch(
    folder: Path, flags: Sequence[str], arguments: Sequence[str], environ: Mapping[str, str], restarts: int = 0
) -> subprocess.Popen:
    """Start the script as a job in `folder`, in a new session; append its output to `folder/job.log`."""
    own = environment(directives(flags), restarts)
    with suppress(FileNotFoundError):
        (folder / "requeued").unlink()
    with open(folder / "job.log", "a") as log:
        print("+", shlex.join(["sbatch", *flags, str(SCRIPT), *arguments]), file=log, flush=True)
        return subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            env={**environ, **own, "PATH": f"{folder / 'bin'}{os.pathsep}{environ['PATH']}"},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def is_requeued(folder: Path) -> bool:
    """Return whether the last job requeued itself."""
    return (folder / "requeued").exists()


def tasks(folder: Path) -> list[int]:
    """Return the process ids of running tasks of srun."""
    path = folder / "tasks"
    return [int(word) for word in path.read_text().split()] if path.exists() else []
