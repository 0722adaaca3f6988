"""nemo-run's executors by name, on which the runs of an experiment run.

`launch.experiment --executor "slurm(account='a', job_dir='/shared', nodes=4)" executor.qos=high`. Every field of the
executor can be set as `executor.FIELD=value`. No code is sent, so install the package where a run starts.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Optional

import nemo_run as run
from nemo_run.config import RUNDIR_NAME
from nemo_run.core.execution.base import Executor

from dit.errors import ConfigError

SAVE_S = 170
"""Seconds that torchrun waits for ranks to save; Slurm sends its signal 10 s earlier, relative to the time limit."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_S), "LOGLEVEL": "WARNING"}
EXPERIMENTS = "experiments"
"""Subfolder of nemo-run's folder for experiments."""


@run.cli.factory
def local() -> run.Config[run.LocalExecutor]:
    """One process on this machine."""
    return run.Config(run.LocalExecutor)


@run.cli.factory
def torchrun(ranks: int = 8) -> run.Config[run.LocalExecutor]:
    """Several processes on this machine, started by torchrun."""
    return run.Config(run.LocalExecutor, ntasks_per_node=ranks, launcher="torchrun")


@run.cli.factory
def slurm(
    account: str,
    job_dir: str,
    partition: Optional[str] = None,
    nodes: int = 1,
    ranks: int = 8,
    time: str = "04:00:00",
) -> run.Config[run.SlurmExecutor]:
    """Jobs of Slurm, submitted from a login node.

    `job_dir` is the absolute path of the folder for nemo-run's scripts and logs, on a disk that all nodes share. A
    failed job is requeued up to three times, whatever its exit code; launch/train.sh depends on the exit code.
    """
    return run.Config(
        run.SlurmExecutor,
        account=account,
        partition=partition,
        nodes=nodes,
        ntasks_per_node=ranks,
        gpus_per_node=ranks,
        time=time,
        launcher="torchrun",  # one task per node, independent of ntasks_per_node
        signal=f"TERM@{SAVE_S + 10}",  # nemo-run's torchrun has no --signals-to-handle; it always forwards SIGTERM
        retries=3,
        tunnel=run.Config(run.LocalTunnel, job_dir=f"{job_dir}/{EXPERIMENTS}"),
        packager=run.Config(run.Packager),
    )


EXECUTORS: dict[str, Callable[..., run.Config]] = {factory.__name__: factory for factory in (local, torchrun, slurm)}


def folder_of(executor: Executor, folder: Optional[Path], words: Iterable[str] = ()) -> Optional[Path]:
    """Return the folder for nemo-run's scripts and logs; None for its default."""
    tunnel = getattr(executor, "tunnel", None)
    if not isinstance(tunnel, run.LocalTunnel):
        return folder
    submitted = Path(tunnel.job_dir)
    target = (folder or submitted.parent).absolute() / EXPERIMENTS
    if target != submitted:
        raise ConfigError(
            f"nemo-run would write scripts to {target} and submit those in {submitted}; give slurm(job_dir=...) as an "
            "absolute path, and leave out --folder"
        )
    for word in (str(submitted), *words):
        if f"/{RUNDIR_NAME}" in word:
            raise ConfigError(
                f"{word}: nemo-run replaces every '/{RUNDIR_NAME}' in a Slurm script by another folder; choose a path "
                "without it"
            )
    for text in (str(submitted), *executor.container_mounts, *executor.env_vars.values()):
        if re.search(r"\s", text):
            raise ConfigError(f"{text!r}: nemo-run writes this into a Slurm script without quotes; use no spaces")
    return submitted.parent
