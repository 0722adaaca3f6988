"""Wrapping of a backbone with Megatron-FSDP, local ranges of its parameters, and updates of their values.

Megatron-FSDP replaces the parameters of the model. Between steps, `named_parameters` returns DTensors with the local
shards. During a forward or backward pass it returns the unsharded ("raw") parameters, whose memory is allocated and
freed as needed. Three parameters a, b, c of one bucket on 2 ranks:

    bucket (flattened)   a a a a a a b b | b c c c c c c .        (`.` is padding)
                         '--- rank 0 --'   '--- rank 1 --'
    rank 0: a [0, 6), b [0, 2)          rank 1: b [2, 3), c [0, 6)       start, stop of `ShardedParameter`
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dit.backends.gradients import finalize_gradients
from dit.backends.process_groups import ProcessGroups
from dit.backends.sharding import sharding_of, write_shard_attributes
from dit.errors import ConfigError
from dit.models.base import Backbone
from dit.parallel.dims import FSDPSharding
from dit.parallel.fsdp_patches import (
    cached_module_walks,
    mesh_of_stage,
    no_chunk_metadata,
    reduce_unsharded,
    release_by_hook,
    shard_between_rows,
)
from dit.patches import patches

BUCKET_ELEMENTS = 40_000_000  # for parameters outside FSDP units; Megatron-Core's bucket size for data parallelism


class _Nested(nn.Module):
    """Nests the backbone one level below the module that Megatron-FSDP wraps.

    Megatron-FSDP calls `forward` of the wrapped module directly, which skips the forward hooks of that module: the
    all-gather hook, and the hook that registers the post-backward callback. One level below, the hooks run.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object) -> Tensor:
        return self.module(*args)


_PREFIX = "module."


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/mcore_fsdp_adapter.py: TELinear, FullyShardedDataParallel",
    why="without Transformer Engine, `isinstance` refuses TELinear; forward hooks of the wrapped module are skipped, "
    "so the backbone is nested",
)
def wrap_fsdp(backbone: Backbone, sharding: FSDPSharding, groups: ProcessGroups) -> FullyShardedDataParallel:
    """Wrap a model with Megatron-FSDP, which shards state over data-parallel ranks and reduces gradients in fp32.

    With a single data-parallel rank, nothing is sharded.
    """
    if sharding == "optim_grads_params" and not backbone.fsdp_units:
        raise ConfigError(
            f"parallel.fsdp_sharding={sharding!r} gathers and frees weights layer by layer, but "
            f"{type(backbone).__name__}.fsdp_units is empty; set it or use fsdp_sharding='optim_grads'"
        )
    if groups.dp_cp.size() == 1:
        # One rank shards nothing; the other choices would count its gradients twice (see `reduces_in_backward`).
        sharding = "optim"
    if not isinstance(mcore_fsdp_adapter.TELinear, type):
        # Without Transformer Engine this is a mock, which the adapter passes to `isinstance` under tensor parallelism.
        mcore_fsdp_adapter.TELinear = type("TELinear", (), {})
    copies = groups.shard_copies
    mesh_of_stage()
    shard_between_rows()
    release_by_hook()
    _prepare_frozen(backbone)
    with cached_module_walks(), no_chunk_metadata():
        wrapped = FullyShardedDataParallel(
            backbone.config,
            DistributedDataParallelConfig(
                use_megatron_fsdp=True,
                data_parallel_sharding_strategy=sharding,
                use_distributed_optimizer=True,
                num_distributed_optimizer_instances=1 if copies is None else copies.size(),
                grad_reduce_in_fp32=True,
                # fp32 weights need no separate master weights.
                preserve_fp32_weights=backbone.config.params_dtype != torch.float32,
                overlap_grad_reduce=sharding != "optim",
                overlap_param_gather=sharding == "optim_grads_params",
                bucket_size=BUCKET_ELEMENTS,
            ),
            _Nested(backbone),
            fsdp_unit_modules=list(backbone.fsdp_units) if sharding == "optim_grads_params" else [],
            pg_collection=groups.collection,
        )
    reduce_unsharded(wrapped.param_and_grad_buffer, copies)
    for parameter in sharded_parameters(wrapped):
        write_shard_attributes(parameter.owner, sharding_of(parameter.raw, parameter.name))
    return wrapped


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: MegatronFSDP._register_fsdp_hooks",
    why="it registers gradient hooks on frozen parameters, and frees weights after a frozen embedding late",
)
def _prepare_frozen(backbone: Backbone) -> None:
    """Prepare a backbone with frozen parameters for Megatron-FSDP.

    Megatron-FSDP registers a gradient hook on every parameter, which torch does not allow for frozen parameters. It
    frees the gathered weights of a unit when the gradient of its input is computed. After a frozen embedding there
    would be no such gradient: the weights of the first unit would stay gathered until the end of the step, and its
    forward pass would not prefetch the next unit.
    """
    frozen = [parameter for parameter in backbone.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.register_post_accumulate_grad_hook = lambda hook: None  # type: ignore[method-assign]
    for unit in backbone.units() if frozen else ():
        unit.register_forward_pre_hook(_differentiable_input)


def _differentiable_input(unit: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make the first input of a unit require a gradient."""
    first, *others = args
    if torch.is_grad_enabled() and not first.requires_grad:
        first = first.detach().requires_grad_()
    return first, *others


@patches(
    "megatron-core 0.16",
    "core/distributed/finalize_model_grads.py: _allreduce_conditional_embedding_grads",
    why="it reads `main_grad`, which the shards of Megatron-FSDP do not have",
)
@torch.no_grad()
def finalize_shards(
    wrapped: Sequence[FullyShardedDataParallel],
    num_tokens: Optional[Tensor],
    pg_collection: Any,
    force_all_reduce: Optional[bool] = False,
) -> None:
    """Reduce the gradients of a step; then sum those of replicated parameters over the pipeline stages and chunks.

    A parameter that every stage has gets a separate bucket, so a data-parallel rank has the same elements of it in
    every stage and chunk.
    """
    finalize_gradients(wrapped, num_tokens, pg_collection, force_all_reduce)
    if pg_collection.pp.size() == 1:
        return
    copies: dict[str, list[Tensor]] = {}
    for parameter in (parameter for chunk in wrapped for parameter in sharded_parameters(chunk)):
        if sharding_of(parameter.raw, parameter.name).every_stage and parameter.owner.grad is not None:
            copies.setdefault(parameter.name, []).append(local(parameter.owner.grad))
    if copies:
        total = torch.cat([torch.stack(gradients).sum(0).flatten() for gradients in copies.values()])
        dist.all_reduce(total, group=pg_collection.pp)
        for gradients, part in zip(copies.values(), total.split([x[0].numel() for x in copies.values()])):
            for gradient in gradients:
                gradient.copy_(part.view_as(gradient))


def reduces_in_backward(wrapped: FullyShardedDataParallel) -> bool:
    """Return whether gradients are reduced during the backward pass instead of after it.

    Unsharded gradients must be reduced after it. During it, Megatron-FSDP would add the reduced gradient to the local
    one, which counts the local one twice, and finalising the gradients would reduce them again.
    """
    return wrapped.ddp_config.data_parallel_sharding_strategy != "optim"


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; return other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter under Megatron-FSDP.

    Attributes:
        raw: the parameter in the forward pass; its shape and attributes are always valid.
        owner: the DTensor that the optimizer updates.
        start, stop: local range of the flattened `raw`.
    """

    name: str
    raw: nn.Parameter
    owner: nn.Parameter
    start: int
    stop: int
    group: ProcessGroup


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: ParamAndGradBuffer.optimizer_named_parameters, "
    "megatron_fsdp_slice, orig_param",
    why="no public function returns the local range of a parameter",
)
def sharded_parameters(wrapped: FullyShardedDataParallel) -> Iterator[ShardedParameter]:
    """Iterate over the parameters of a wrapped model in Megatron-FSDP's order."""
    for name, owner in wrapped.param_and_grad_buffer.optimizer_named_parameters:
        span, group = owner.megatron_fsdp_slice, owner.device_mesh.get_group("dp_cp")
        yield ShardedParameter(name.removeprefix(_PREFIX), owner.orig_param, owner, span.start, span.stop, group)


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: all_gather_pipeline, install_optimized_model_weights, "
    "synchronize_param_gather",
    why="no public function copies master weights to the model outside of a step",
)
def use_updated_weights(wrapped: FullyShardedDataParallel) -> None:
    """Copy the optimizer's current values to the weights of the next forward pass."""
    fsdp = wrapped.module
    gathering = fsdp.all_gather_pipeline
    # Wait for prefetches, which may still read the shards that are overwritten next; their results are discarded.
    for bucket in list(gathering.param_gather_event_map):
        gathering.wait_bucket_ready(*bucket)
    fsdp.install_optimized_model_weights()
    fsdp.synchronize_param_gather()
    wrapped.start_param_sync()


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: ParamAndGradBuffer.weight_alloc",
    why="no public function returns the memory of gathered weights",
)
def gathered_bytes(wrapped: Sequence[nn.Module]) -> int:
    """Return the bytes of the weights that FSDP gathered; between steps, the next step needs these first."""
    chunks = [chunk for chunk in wrapped if isinstance(chunk, FullyShardedDataParallel)]
    buckets = [bucket for c in chunks for bucket in c.param_and_grad_buffer.weight_alloc.buckets.values()]
    return sum(bucket.data.untyped_storage().nbytes() for bucket in buckets)
