"""Patches of Megatron-FSDP.

Shards end between rows, a hook frees weights, the reduction of unsharded gradients skips frozen parameters and sums
over the instances of hybrid sharding, walks over modules are cached, and ranges for torch's checkpoints are left out.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Optional

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dit.patches import patches, replaced

Layout = tuple[
    dict[int, param_and_grad_buffer.TensorItemIndex],
    param_and_grad_buffer.BucketIndex,
    param_and_grad_buffer.ShardBucketIndex,
]
"""The range of each parameter in a bucket, the bucket, and this rank's shard of it."""
_NAME = "build_data_parallel_buffer_index"


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/mcore_fsdp_adapter.py: _get_dp_tp_mesh, _get_hsdp_tp_mesh",
    why="they require that one mesh contains all ranks, which excludes pipelines",
)
def mesh_of_stage() -> None:
    """Make Megatron-FSDP build its mesh from the ranks of one pipeline stage; a second call changes nothing.

    For example, with TP 2, DP 2 and PP 2, the second stage has ranks 4 to 7 and the mesh [[4, 5], [6, 7]].
    """
    mcore_fsdp_adapter._get_dp_tp_mesh = lambda data, tensor, ep_size=1: _mesh(data, tensor)
    mcore_fsdp_adapter._get_hsdp_tp_mesh = _mesh


def _mesh(*groups: ProcessGroup) -> Tensor:
    """Return the ranks whose indices differ from this rank's only in these groups; dimension i follows group i.

    Pipeline stages are numbered last (`dit.backends.process_groups`), so a change of one index adds the same amount to
    the rank for all values of the others.
    """
    rank = dist.get_rank()
    steps = [torch.tensor(dist.get_process_group_ranks(group)) - rank for group in groups]
    return rank + torch.stack(torch.meshgrid(*steps, indexing="ij")).sum(0)


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: build_data_parallel_buffer_index",
    why="a shard may end inside a row, which fails with \"shape '[-1, n]' is invalid\"",
)
def shard_between_rows() -> None:
    """Prevent shards from ending inside a row of a matrix; a second call does nothing.

    Shards of a bucket end at multiples of its chunk size, and parameters are placed in the bucket so that no row
    crosses such a boundary. Parameters smaller than a chunk fill gaps; those that fit no gap are appended at the end,
    where a boundary may be inside a row. The patch moves these parameters. Chunks of 4 elements; a and b are matrices
    of one row of 3 elements:

        before   ... | a a a b | b b      b crosses a boundary
        after    ... | a a a . | b b b
    """
    original = getattr(param_and_grad_buffer, _NAME)
    if not hasattr(original, "__wrapped__"):
        setattr(param_and_grad_buffer, _NAME, _ends_between_rows(original))


def _ends_between_rows(layout: Callable[..., Layout]) -> Callable[..., Layout]:
    @wraps(layout)
    def patched(
        elements: list[torch.Size],
        rank: int,
        world_size: int,
        is_distributed: bool,
        config: DistributedDataParallelConfig,
        bucket_id: int = 0,
        chunk_size_factor: int = 1,
    ) -> Layout:
        items, bucket, shard = layout(
            elements, rank, world_size, is_distributed, config, bucket_id, chunk_size_factor=chunk_size_factor
        )

        def up(index: int, step: int) -> int:
            return -(-index // step) * step

        def is_cut(start: int, size: int) -> bool:
            return start // chunk_size_factor != (start + size - 1) // chunk_size_factor

        small = (i for i, item in items.items() if item.size < chunk_size_factor and item.shape[1:].numel() > 1)
        moved = [i for i in small if is_cut(items[i].global_data_index, items[i].size)]
        if not moved:
            return items, bucket, shard
        end = max((x.global_data_index + x.size for i, x in items.items() if i not in moved), default=0)
        for i in moved:
            size = items[i].size
            start = up(end, chunk_size_factor) if is_cut(end, size) else end
            items[i] = items[i]._replace(global_data_index=start)
            end = start + size
        bucket = bucket._replace(size=up(end, world_size * chunk_size_factor), items=list(items.values()))
        shard = param_and_grad_buffer._get_dp_buffer_shard_bucket_index(bucket, is_distributed, world_size, rank)
        return items, bucket, shard

    return patched


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: RegisterFSDPBackwardFunction",
    why="its autograd node changes the order of sums, so bf16 gradients differ from one rank",
)
def release_by_hook() -> None:
    """Free the weights of a unit without changing the order in which gradients are summed; a second call does nothing.

    Megatron-FSDP frees the gathered weights of a unit (a layer) after its backward pass. To detect its end, it inserts
    an autograd node between the unit and all of its inputs. The unit's contributions to the gradient of an input are
    then summed in this node first. In bf16 this changes the result if a unit uses an input several times and other
    modules use it too, such as the skips of a UNet or the conditioning vector of all layers:

        x -+-> skip -------------------->          without the node    (skip + shortcut) + branch
           '-> [node] -+-> shortcut ----> unit     with the node       skip + (shortcut + branch)
                       '-> branch ------>

    Both orders are equally accurate, but a run on one rank has no such node. The patch uses a hook on the first input
    of the unit instead of a node. Autograd runs nodes in the reverse order of their creation, and AccumulateGrad
    immediately. When it reaches the node that produced the input, all nodes of the unit have run.
    """
    megatron_fsdp.RegisterFSDPBackwardFunction = _ReleaseAfterBackward


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: ParamAndGradBuffer.reduce_scatter_gradients",
    why="it fails for frozen parameters, and does not sum over the instances of hybrid sharding",
)
def reduce_unsharded(buffer: param_and_grad_buffer.ParamAndGradBuffer, copies: Optional[ProcessGroup]) -> None:
    """Make the reduction of unsharded gradients skip groups of frozen parameters, and sum over all instances."""
    reduce = buffer.reduce_scatter_gradients

    def reduce_trained(async_op: bool = True) -> None:
        trained = [group for group in buffer.parameter_groups if group.main_grad_buffer is not None]
        with replaced(buffer, parameter_groups=trained):
            reduce(async_op)
        if copies is not None:
            for group in trained:
                dist.all_reduce(group.main_grad_buffer.get_shard_from_local_buffer(), group=copies)

    buffer.reduce_scatter_gradients = reduce_trained


class _ReleaseAfterBackward:
    """Replaces the autograd function that Megatron-FSDP applies to the inputs of a unit."""

    @staticmethod
    def apply(release: Callable[[], None], first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Register `release` to run after the backward pass of the unit; return the unit's inputs."""
        if first.is_leaf:
            first = first.view_as(first)  # AccumulateGrad of a leaf would run before other nodes of the unit

        def after_backward(grad: Tensor) -> None:
            release()

        first.register_hook(after_backward)
        # The unit that produced the input also has a hook on it, which gathers weights and must run after this one.
        hooks = first._backward_hooks
        assert hooks is not None  # register_hook creates it
        for key in list(hooks)[:-1]:
            hooks[key] = hooks.pop(key)
        return first, *others


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: update_uneven_dtensor_chunk_metadata, "
    "validate_uneven_dtensor",
    why="three object collectives for each parameter take most of the time to wrap a small model",
)
def no_chunk_metadata() -> AbstractContextManager[None]:
    """Leave out the ranges of shards that only torch's distributed checkpoints read, in a model wrapped here.

    `dit.checkpoint` computes ranges from the local index of each buffer.
    """
    names = ("update_uneven_dtensor_chunk_metadata", "validate_uneven_dtensor")
    return replaced(param_and_grad_buffer, **dict.fromkeys(names, lambda _: None))


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: MegatronFSDP._register_fsdp_hooks, is_submodule",
    why="wrapping thousands of experts takes minutes",
)
@contextmanager
def cached_module_walks() -> Iterator[None]:
    """Cache Megatron-FSDP's walks over a model that is wrapped in this context.

    To find the unit of a module, Megatron-FSDP walks over the modules of all units, and for every module it walks over
    all parameters of the model. Modules and parameters do not change while the hooks are registered.
    """
    submodules: dict[nn.Module, set[nn.Module]] = {}
    hooks = megatron_fsdp.MegatronFSDP._register_fsdp_hooks

    def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
        if parent_module not in submodules:
            submodules[parent_module] = set(parent_module.modules())
        return module in submodules[parent_module] and not (strict and module is parent_module)

    def register_hooks(fsdp: nn.Module, root: nn.Module) -> None:
        walk, cached = root.parameters, list(root.parameters())
        root.parameters = lambda recurse=True: iter(cached) if recurse else walk(recurse)  # type: ignore[method-assign]
        try:
            hooks(fsdp, root)
        finally:
            del root.parameters

    with (
        replaced(megatron_fsdp.MegatronFSDP, _register_fsdp_hooks=register_hooks),
        replaced(megatron_fsdp, is_submodule=is_submodule),
        replaced(param_and_grad_buffer, is_submodule=is_submodule),
    ):
        yield
