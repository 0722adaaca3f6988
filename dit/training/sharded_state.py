"""The model's state on disk: named, sharded tensors that any layout can read.

Every parameter has four global fp32 tensors: `weight` (the master copy), `ema`, `exp_avg`, `exp_avg_sq`. Nothing in
them depends on the optimizer or the layout that wrote them. The work is Megatron-Core's distributed checkpointing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor, nn

from dit.backends.process_groups import ProcessGroups
from dit.parallel.parallelize import is_expert, is_replicated_over_pipeline
from dit.training.ema import EMA
from dit.training.optim import SLOTS, MasterShard, get_step_count, publish_masters, set_step_count
from dit.training.sharded_write import write_sharded


def sharded_tensor(key: str, data: Tensor, parameter: nn.Parameter, groups: ProcessGroups) -> ShardedTensor:
    """Describe one rank's part of a global tensor shaped like `parameter`.

    Copies on other ranks (data parallel, tensor parallel for whole parameters, pipeline stages for conditioning) are
    replicas; one is written. An expert is a tensor of its own name, whole on the ranks that hold it.
    """
    if is_expert(parameter):
        return ShardedTensor.from_rank_offsets(key, data, replica_id=(0, 0, groups.collection.expt_dp.rank()))
    tp_rank, tp_size = groups.tp.rank(), groups.tp.size()
    split = getattr(parameter, "tensor_model_parallel", False)
    offsets = [(parameter.partition_dim, tp_rank, tp_size)] if split else []  # type: ignore[attr-defined]
    stage = groups.pp.rank() if is_replicated_over_pipeline(parameter) else 0
    replica = (stage, 0 if split else tp_rank, groups.dp_cp.rank())
    return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica)


def save_state(
    directory: Path,
    shards: list[MasterShard],
    ema: Optional[EMA],
    optimizer: Any,
    groups: ProcessGroups,
) -> None:
    """Write weights, average and optimizer state into `directory`; every rank calls this.

    Raises:
        OSError, CheckpointError: this rank, or another one, could not write.
    """
    state: dict[str, Any] = {}
    for i, shard in enumerate(shards):
        if f"weight.{shard.name}" in state:
            continue  # another chunk's copy, equal to the bit
        slots = {"weight": shard.main, **{slot: shard.slot(slot) for slot in SLOTS}}
        if ema is not None:
            slots["ema"] = ema.values[i]
        for slot, values in slots.items():
            key = f"{slot}.{shard.name}"
            state[key] = sharded_tensor(key, shard.gather(values), shard.parameter, groups)
    state["adam_step"] = get_step_count(optimizer)
    write_sharded(state, directory)


@torch.no_grad()
def load_state(
    directory: Path,
    shards: list[MasterShard],
    ema: Optional[EMA],
    optimizer: Any,
    wrapped: Sequence[Any],
    groups: ProcessGroups,
) -> None:
    """Read what `save_state` wrote, on any layout, into masters, average, optimizer and model."""
    names = ["weight", *SLOTS] + (["ema"] if ema is not None else [])
    request: dict[str, Any] = {"adam_step": 0}
    for shard in shards:
        shard.ensure_state()
        for slot in names:
            key = f"{slot}.{shard.name}"
            empty = torch.empty(shard.parameter.shape, dtype=torch.float32, device=shard.parameter.device)
            request[key] = sharded_tensor(key, empty, shard.parameter, groups)
    loaded = dist_checkpointing.load(request, str(directory))
    for i, shard in enumerate(shards):
        targets = {"weight": shard.main, **{slot: shard.slot(slot) for slot in SLOTS}}
        if ema is not None:
            targets["ema"] = ema.values[i]
        for slot, target in targets.items():
            target.copy_(shard.scatter(loaded[f"{slot}.{shard.name}"]))
    set_step_count(optimizer, int(loaded["adam_step"]))
    publish_masters(optimizer, wrapped)


@torch.no_grad()
def load_weights(directory: Path, chunks: Sequence[nn.Module], groups: ProcessGroups, *, slot: str = "ema") -> None:
    """Read only the weights (`weight`) or their average (`ema`) into bare model chunks, for sampling and export."""
    parameters = [pair for chunk in chunks for pair in chunk.named_parameters()]
    request: dict[str, Any] = {
        name: sharded_tensor(f"{slot}.{name}", torch.empty_like(p, dtype=torch.float32), p, groups)
        for name, p in parameters
    }
    loaded = dist_checkpointing.load(request, str(directory))
    for name, parameter in parameters:
        parameter.copy_(loaded[name])
