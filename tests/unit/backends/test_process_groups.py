"""Number of ranks with and without a launcher, GPUs of ranks, and signals while ranks connect."""

import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from dit.backends import process_groups
from dit.backends.process_groups import world_size_from_environment
from dit.errors import ConfigError
from dit.parallel.dims import ParallelConfig
from dit.verify.ranks import FORKS, free_port

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("environ", "world_size"),
    [
        ({}, 1),
        ({"RANK": "3", "WORLD_SIZE": "8"}, 8),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", "RANK": "3", "WORLD_SIZE": "8"}, 8),  # torchrun in each task
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}, 1),  # a shell of salloc
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, 1),  # the script of sbatch
        # salloc's shell on clusters that start it on the first node: a step of one task in a larger allocation
        ({**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1),
    ],
)
def test_the_world_has_the_ranks_of_the_launcher(environ, world_size, monkeypatch):
    set_environment(environ, monkeypatch)
    assert world_size_from_environment() == world_size


def test_tasks_of_srun_without_torchrun_are_refused(monkeypatch):
    """Each would train as rank 0 of a world of one, and all would write the same run folder."""
    set_environment({**SRUN, "SLURM_STEP_NUM_TASKS": "2"}, monkeypatch)
    with pytest.raises(ConfigError, match=r"2 tasks.*--ntasks-per-node=1 torchrun.*launch/README\.md"):
        world_size_from_environment()


@pytest.mark.parametrize(("gpus", "visible"), [(4, {}), (4, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}), (1, {})])
def test_more_ranks_than_gpus_are_refused(gpus, visible, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr(process_groups, "use_cuda", lambda: True)
    set_environment({"LOCAL_WORLD_SIZE": "8", **visible}, monkeypatch)
    with pytest.raises(ConfigError, match=rf"8 ranks.*{gpus} visible GPU.*--nproc-per-node={gpus}"):
        process_groups.connect()


@pytest.mark.parametrize(("gpus", "visible"), [(8, {}), (1, {"CUDA_VISIBLE_DEVICES": "3"})])
def test_a_launcher_may_show_one_gpu_to_each_rank(gpus, visible, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    set_environment(visible, monkeypatch)
    process_groups.check_gpus(local_ranks=8)


def connect_until_a_signal(environ: dict[str, str]) -> None:
    """Connect to ranks that do not respond; the process ends with 75 at the signal."""
    os.environ |= environ
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(75))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    process_groups.connect(timeout_s=100)


def test_a_signal_ends_a_rank_that_waits_for_its_peers():
    """Its peers were killed before they connected; torch waits in C++, where Python runs no handlers of signals."""
    processes = []
    for rank in (0, 1):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DIT_DEVICE": "cpu"}
        processes.append(FORKS.Process(target=connect_until_a_signal, args=(world | address,)))
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [75, 75]
    finally:
        for process in processes:
            process.kill()


def set_environment(environ, monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "SLURM_NTASKS",
        "SLURM_PROCID",
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def left_after_groups() -> tuple[list[str], int]:
    """Return Megatron-Core's groups after all are destroyed, and the number of their threads."""
    threads = len(os.listdir("/proc/self/task"))
    os.environ["DIT_DEVICE"] = "cpu"
    process_groups.initialize(ParallelConfig())
    process_groups.destroy()
    groups = [name for name, value in vars(parallel_state).items() if isinstance(value, dist.ProcessGroup)]
    return groups, len(os.listdir("/proc/self/task")) - threads


def test_destroyed_groups_leave_no_group_and_no_thread() -> None:
    with ProcessPoolExecutor(1, FORKS) as pool:
        assert pool.submit(left_after_groups).result() == ([], 0)
