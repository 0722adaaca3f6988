"""Megatron-FSDP around a backbone: how it is wrapped, where each rank's part of a parameter lies, how to fill it anew.

Megatron-FSDP replaces the parameters of the model: between steps `named_parameters` gives DTensors that hold this
rank's shard, during a forward or backward pass the whole ("raw") parameters, whose memory comes and goes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dit.backends.process_groups import ProcessGroups
from dit.backends.sharding import sharding_of, write_shard_attributes
from dit.errors import ConfigError
from dit.models.base import Backbone
from dit.parallel.dims import FSDPSharding
from dit.parallel.fsdp_rows import keep_rows_whole

BUCKET_ELEMENTS = 40_000_000  # of what no unit holds; Megatron-Core's size for plain data parallelism


class _Called(nn.Module):
    """Hold the backbone one level below the module that Megatron-FSDP wraps.

    Megatron-FSDP runs `forward` of what it wraps without calling it, which passes by that module's hooks: the one that
    gathers its own parameters, and the one that opens the books of a backward pass (which would then hang on the module
    that was registered last, whenever that one runs). One level below, they run.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object) -> Tensor:
        return self.module(*args)


_PREFIX = "module."


def wrap_fsdp(backbone: Backbone, sharding: FSDPSharding, groups: ProcessGroups) -> FullyShardedDataParallel:
    """Wrap a model so that data-parallel ranks share its optimizer, gradients and weights (fp32 reduction).

    Args:
        sharding: what is shared; a single data-parallel rank shares nothing.

    Raises:
        ConfigError: the backbone does not name the layers that are gathered and freed as one.
    """
    if sharding == "optim_grads_params" and not backbone.fsdp_units:
        raise ConfigError(
            f"parallel.fsdp_sharding={sharding!r} needs layers to gather and free one by one, but "
            f"{type(backbone).__name__}.fsdp_units names none; name them or use fsdp_sharding='optim_grads'"
        )
    if groups.dp_cp.size() == 1:
        # All kinds are the same then, and this one has the least machinery. The others would count gradients twice, as
        # `reduces_in_backward` explains.
        sharding = "optim"
    if not isinstance(mcore_fsdp_adapter.TELinear, type):
        # Without Transformer Engine this is a mock, and the adapter asks `isinstance` of it under tensor parallelism.
        mcore_fsdp_adapter.TELinear = type("TELinear", (), {})
    keep_rows_whole()
    wrapped = FullyShardedDataParallel(
        backbone.config,
        DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=sharding,
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            # fp32 weights are their own masters.
            preserve_fp32_weights=backbone.config.params_dtype != torch.float32,
            overlap_grad_reduce=sharding != "optim",
            overlap_param_gather=sharding == "optim_grads_params",
            bucket_size=BUCKET_ELEMENTS,
        ),
        _Called(backbone),
        fsdp_unit_modules=list(backbone.fsdp_units) if sharding == "optim_grads_params" else [],
        pg_collection=groups.collection,
    )
    for parameter in sharded_parameters(wrapped):
        write_shard_attributes(parameter.owner, sharding_of(parameter.raw, parameter.name))
    return wrapped


def reduces_in_backward(wrapped: FullyShardedDataParallel) -> bool:
    """Tell whether gradients are reduced while the backward pass runs, and not only when it is over.

    With unsharded gradients they must not be: Megatron-FSDP then adds the reduced shard to this rank's own sum, which
    is part of it already, and reduces a second time when gradients are finished.
    """
    return wrapped.ddp_config.data_parallel_sharding_strategy != "optim"


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds; a plain tensor is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter under Megatron-FSDP.

    Attributes:
        name: its name in the backbone.
        raw: the parameter that the forward pass uses; its shape and attributes are valid at all times.
        owner: the DTensor that the optimizer updates.
        start, stop: range of the flattened `raw` that `owner` holds on this rank.
        group: ranks among which the shards are spread.
    """

    name: str
    raw: nn.Parameter
    owner: nn.Parameter
    start: int
    stop: int
    group: ProcessGroup


def sharded_parameters(wrapped: FullyShardedDataParallel) -> Iterator[ShardedParameter]:
    """List the parameters of a wrapped model, in Megatron-FSDP's order."""
    for name, owner in wrapped.param_and_grad_buffer.optimizer_named_parameters:
        span, group = owner.megatron_fsdp_slice, owner.device_mesh.get_group("dp_cp")
        yield ShardedParameter(name.removeprefix(_PREFIX), owner.orig_param, owner, span.start, span.stop, group)


def publish(wrapped: FullyShardedDataParallel) -> None:
    """Let the next forward pass use the values that the optimizer's parameters hold now."""
    fsdp = wrapped.module
    gathering = fsdp.all_gather_pipeline
    # A prefetch may still read the shards that are overwritten next; what it gathers is thrown away.
    for bucket in list(gathering.param_gather_event_map):
        gathering.wait_bucket_ready(*bucket)
    fsdp.install_optimized_model_weights()
    fsdp.synchronize_param_gather()
    wrapped.start_param_sync()
