"""Process groups: torch.distributed and Megatron-Core's parallel state, from one `ParallelConfig`."""

import os
import pickle
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, Optional, Protocol

import torch
import torch.distributed as dist

from dit.backends import megatron_cpu
from dit.backends.device import destroy_graphs, local_device, use_cuda
from dit.backends.rendezvous import store_of_attempt
from dit.backends.sharding import Axis
from dit.errors import ConfigError, page_of
from dit.patches import patches

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

START_S = 600.0
"""Longest wait for the other ranks to connect, in seconds."""


class GroupSizes(Protocol):
    """Sizes of the groups, implemented by `dit.parallel.dims.ParallelConfig`."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: Optional[int]
    context_parallel_size: int
    context_a2a_size: Optional[int]
    expert_model_parallel_size: int
    num_distributed_optimizer_instances: int


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of this rank.

    Attributes:
        collection: Megatron-Core's `ProcessGroupCollection`, passed to its layers, optimizer and schedules.
        dp_size, dp_rank: number of model replicas and index of this rank's replica. Replicas read different samples;
            the context-parallel ranks of a replica read the same samples.
    """

    collection: "ProcessGroupCollection"
    world_size: int
    rank: int
    dp_size: int
    dp_rank: int

    @property
    def tp(self) -> dist.ProcessGroup:
        return self.collection.tp

    @property
    def pp(self) -> dist.ProcessGroup:
        """The pipeline stages of one replica, which read the same samples."""
        return self.collection.pp

    @property
    def is_data_reader(self) -> bool:
        """Whether this is rank (tp, cp, pp) = (0, 0, 0) of its replica."""
        return self.tp.rank() == 0 and self.pp.rank() == 0 and self.collection.cp.rank() == 0

    @property
    def cp(self) -> dist.ProcessGroup:
        """Ranks over which the tokens of every sample are split."""
        return self.collection.cp

    @property
    def tp_cp(self) -> dist.ProcessGroup:
        """The ranks of one pipeline stage that read the same samples."""
        return self.collection.tp_cp

    @property
    def stage(self) -> dist.ProcessGroup:
        """All ranks of one pipeline stage."""
        return self.collection.tp_dp_cp

    @property
    def dp(self) -> dist.ProcessGroup:
        """Ranks with the same shard of the model and different samples."""
        return self.collection.dp

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks with different tokens, over which gradients and losses are summed."""
        return self.collection.dp_cp

    @property
    def shard_copies(self) -> Optional[dist.ProcessGroup]:
        """Ranks with the same FSDP shard, one in each instance of hybrid sharding; None for one instance."""
        return self.collection.inter_dist_opt

    def along(self, axis: Axis) -> dist.ProcessGroup:
        """Return the ranks that differ from this one only along `axis`."""
        if axis == "expert_dp":
            return self.collection.expt_dp
        return {"tp": self.tp, "pp": self.pp, "dp_cp": self.dp_cp}[axis]


def world_size_from_environment() -> int:
    """Return the number of ranks that torchrun started; 1 without torchrun."""
    # SLURM_NTASKS does not work: it describes the allocation and is also set in salloc shells and sbatch scripts.
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" not in os.environ and tasks > 1:
        raise ConfigError(
            f"srun started {tasks} tasks without ranks (RANK is not set), so {tasks} separate runs would write to one "
            "run folder; start one torchrun per node, srun --ntasks-per-node=1 torchrun ..., as in "
            f"{page_of('launch')}"
        )
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_gpus(local_ranks: int) -> None:
    """Check that each rank of this machine has a GPU.

    A launcher may also hide all GPUs except one from each rank, by `CUDA_VISIBLE_DEVICES`.

    Raises:
        ConfigError: there are more ranks than GPUs.
    """
    gpus = torch.cuda.device_count()
    if local_ranks > gpus and not (gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ):
        raise ConfigError(
            f"{local_ranks} ranks on this machine, which has {gpus} visible GPU{'' if gpus == 1 else 's'}; NCCL needs "
            f"one for each; give --nproc-per-node={gpus}, or set DIT_DEVICE=cpu to train on the CPU"
        )


def connect(*, timeout_s: float = 600.0) -> None:
    """Initialise torch.distributed (NCCL on CUDA, gloo on CPU) if it is not initialised yet.

    Without torchrun, the process becomes a world of one rank, so no other code checks whether it runs distributed.

    Args:
        timeout_s: longest wait in a collective.

    Raises:
        DistStoreError, DistNetworkError: the other ranks did not respond within `START_S`.
    """
    if dist.is_initialized():
        return
    if use_cuda():
        check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        torch.cuda.set_device(local_device())
    # Torch waits for the other ranks in C++, where Python runs no handlers of signals; this thread runs them.
    result = Future[None]()
    Thread(target=_connect, args=(timeout_s, result), name="connect", daemon=True).start()
    try:
        result.result()
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"port {os.environ['MASTER_PORT']} of this machine ({os.environ['MASTER_ADDR']}) is in use by another run "
            "or program; use torchrun --standalone for a free port, or set one with torchrun --master-port=N or "
            "MASTER_PORT=N"
        ) from error


def _connect(timeout_s: float, result: "Future[None]") -> None:
    """Connect to the other ranks; the result is None or the error."""
    try:
        store: dist.Store = dist.HashStore()
        rank, size = 0, 1
        if "RANK" in os.environ:
            store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_S)))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store = store_of_attempt(store, rank, size, START_S)
        backend, timeout = "nccl" if use_cuda() else "gloo", timedelta(seconds=timeout_s)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        result.set_result(None)
    except BaseException as error:
        result.set_exception(error)


def initialize(parallel: GroupSizes, *, timeout_s: float = 600.0) -> ProcessGroups:
    """Initialise torch.distributed if it is not initialised yet, and build Megatron-Core's groups."""
    if not use_cuda():
        megatron_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    connect(timeout_s=timeout_s)
    inner = parallel.context_a2a_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        hierarchical_context_parallel_sizes=inner and [inner, parallel.context_parallel_size // inner],
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        num_distributed_optimizer_instances=parallel.num_distributed_optimizer_instances,
        expert_tensor_parallel_size=1,  # an expert is not split; the default is the tensor-parallel size
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,  # Megatron-Core passes it to timedelta, which accepts floats
    )
    # Megatron-Core's layers require its RNG tracker, although this project never draws from it.
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    return ProcessGroups(
        collection=ProcessGroupCollection.use_mpu_process_groups(),
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks for tensors in host memory (collective over all ranks).

    Args:
        group: one of the groups that partition the ranks, such as `ProcessGroups.dp`.
    """
    if dist.get_backend(group) == "gloo":
        return group
    groups = gather_objects(tuple(dist.get_process_group_ranks(group)))
    own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in sorted(set(groups))], backend="gloo")
    assert own is not None  # every rank is in one of them
    return own


def any_rank(flag: bool) -> bool:
    """Return on every rank whether `flag` is True on any rank (collective)."""
    return any_rank_each(flag)[0]


def any_rank_each(*flags: bool) -> list[bool]:
    """Return on every rank, for each flag, whether it is True on any rank (collective)."""
    maxima = torch.tensor(flags, dtype=torch.float32, device=local_device())
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return [bool(value) for value in maxima.tolist()]


def gather_objects(value: Any, group: Optional[dist.ProcessGroup] = None) -> list[Any]:
    """Return the values of all ranks of a group, by default of all ranks; every rank of it calls this.

    The value of the only rank of a group is not a copy.
    """
    if dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_on_first(value: Any) -> Optional[list[Any]]:
    """Return the values of all ranks on rank 0, None on other ranks; every rank calls this.

    All ranks receive the bytes, because NCCL would connect rank 0 to every rank for a gather, with buffers for each.
    """
    contents = gather_objects(pickle.dumps(value))
    return [pickle.loads(content) for content in contents] if dist.get_rank() == 0 else None


def all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum a tensor over the ranks of a group; every rank of it calls this.

    One rank makes no call. NCCL would allocate buffers of about 400 MB for the first call of its group.
    """
    if group.size() > 1:
        dist.all_reduce(values, group=group)


def raise_together(failure: Optional[BaseException], otherwise: BaseException) -> None:
    """Raise an error on every rank if any rank failed (collective).

    Args:
        failure: the error of this rank, raised again here; None if this rank did not fail.
        otherwise: error to raise on a rank that did not fail, if another rank did.
    """
    failed = any_rank(failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise otherwise


@patches(
    "torch 2.11-2.14",
    "torch/distributed: distributed_c10d._world, tensor.debug._clear_sharding_prop_cache; "
    "megatron/core/parallel_state.py: _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    why="Megatron-Core does not destroy its groups, DTensor's cache outlives them, and torch has no public list",
)
def release() -> None:
    """Destroy Megatron-Core's groups and all CUDA graphs; torch.distributed stays initialised for another layout.

    Megatron-Core itself only drops its references, which leaks the threads and connections of the groups.
    """
    from megatron.core import parallel_state
    from torch.distributed.distributed_c10d import _world
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    destroy_graphs()
    parallel_state.destroy_model_parallel()
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # Megatron-Core keeps it, with its threads
    megatron_cpu.forget_groups()
    # DTensor's cache (Megatron-FSDP) identifies meshes by their ranks, even after their groups are destroyed.
    _clear_sharding_prop_cache()
    for group in list(_world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def destroy() -> None:
    """Destroy Megatron-Core's groups and torch.distributed."""
    release()
    if dist.is_initialized():
        dist.destroy_process_group()
