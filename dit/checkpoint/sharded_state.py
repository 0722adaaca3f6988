"""The model's state on disk: named tensors that any layout can write and read without gathering them.

Every parameter has four global fp32 tensors: `weight` (the master copy), `ema`, `exp_avg`, `exp_avg_sq`; a weight that
Muon updates has no `exp_avg_sq`, and a run has `ema_power_LENGTH` for each length in `training.ema_sigma_rel`. They do
not depend on the layout that wrote them. Each rank writes and reads the boxes of its local ranges (`dit.boxes`). Ranks
with copies of a range write equal shares of it. An example:

    weight.layers.0.mlp.linear_fc1.weight, 4 x 4, TP 2 (rows), 2 data-parallel ranks with a distributed optimizer

        0 0 0 0      rank (tp 0, dp 0) writes row 0      each as one box into its own file;
        1 1 1 1      rank (tp 0, dp 1) writes row 1      any other layout reads the boxes
        2 2 2 2      rank (tp 1, dp 0) writes row 2      that overlap with its local ranges
        3 3 3 3      rank (tp 1, dp 1) writes row 3
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dit.backends.device import local_device, synchronize
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import ProcessGroups, gather_objects, gather_on_first
from dit.backends.sharding import sharding_of
from dit.boxes import Box, Part
from dit.checkpoint.state_files import INDEX, StateReader, Weights, file_of_rank, head_of, index_text, tensors_text
from dit.optimizer.ema import EMA
from dit.optimizer.master_weights import (
    MasterShard,
    copy_masters_to_model,
    copy_of,
    get_step_count,
    part_of,
    set_step_count,
)
from dit.parallel.loss_scale import loss_scale_of

ADAM_STEP = "adam_step"
MIN_SHARE_ELEMENTS = 1024


def parameters_of(shards: Iterable[MasterShard]) -> Iterator[tuple[str, nn.Parameter]]:
    """List the parameters of master shards with their names."""
    return ((shard.name, shard.parameter) for shard in shards)


def global_shapes(parameters: Iterable[tuple[str, nn.Parameter]], groups: ProcessGroups) -> dict[str, list[int]]:
    """Return the unsharded shape of every parameter by global name; equal on every layout and rank."""
    shapes = {
        name: list(sharding_of(parameter, name).global_shape(parameter.shape, groups.tp.size()))
        for name, parameter in parameters
    }
    return {name: shape for part in gather_objects(shapes) for name, shape in part.items()}


def share_of_copy(owned: Part, name: str, index: int, count: int) -> Part:
    """Return the equal share of a range that the `index`-th of `count` ranks with copies of it writes.

    A small range is written by only one rank, which keeps the index short.
    """
    if owned.stop - owned.start >= MIN_SHARE_ELEMENTS * count:
        return owned.share(index, count)
    writes = zlib.crc32(name.encode()) % count == index
    return owned if writes else replace(owned, stop=owned.start)


def _values(shards: Sequence[MasterShard], ema: Optional[EMA], i: int) -> dict[str, Tensor]:
    if shards[i].host is not None:
        synchronize()  # an update copies the moments while the host continues
    values = {"weight": shards[i].main, **{slot: shards[i].slot(slot) for slot in shards[i].slots}}
    if ema is not None:
        values |= {slot: averages[i] for slot, averages in ema.by_slot.items()}
    return values


@dataclass(frozen=True)
class LocalState:
    """State that one rank writes.

    Attributes:
        parts: global shape, boxes and names of the tensors of each parameter that the rank writes a part of.
        values: a view of the state for each box, in the order of `boxes`.
    """

    parts: dict[str, tuple[tuple[int, ...], list[Box], list[str]]]
    values: list[Tensor]

    @property
    def boxes(self) -> dict[str, list[Box]]:
        return {f"{slot}.{name}": boxes for name, (_, boxes, slots) in self.parts.items() for slot in slots}


def local_state(shards: Sequence[MasterShard], ema: Optional[EMA], groups: ProcessGroups) -> LocalState:
    """Return the state that this rank writes, as views."""
    local = LocalState({}, [])
    seen = set()
    for i, shard in enumerate(shards):
        if shard.name in seen:
            continue  # copy of another chunk, bitwise equal
        seen.add(shard.name)
        owned = part_of(shard.parameter, groups, shard.start, shard.stop)
        share = share_of_copy(owned, shard.name, *copy_of(shard, groups))
        tensors = _values(shards, ema, i)
        if share.start < share.stop:
            boxes = [box for box, _ in share.views(shard.main, shard.start)]
            local.parts[shard.name] = owned.shape, boxes, list(tensors)
            local.values.extend(view for tensor in tensors.values() for _, view in share.views(tensor, shard.start))
    return local


def index_of(local: LocalState, groups: ProcessGroups) -> str:
    """Return the tensors of the index on rank 0, see `tensors_text`, and an empty text on the others."""
    parts = gather_on_first(LocalState(local.parts, []))
    if parts is None:
        return ""
    shapes = {
        f"{slot}.{name}": shape for part in parts for name, (shape, _, slots) in part.parts.items() for slot in slots
    }
    return tensors_text(shapes, {file_of_rank(rank): part.boxes for rank, part in enumerate(parts)})


def scalars_of(optimizer: MegatronOptimizer) -> dict[str, float]:
    """Return the number of updates, and the loss scale of an fp16 run; every rank calls this."""
    scale, count = loss_scale_of(optimizer), torch.tensor(get_step_count(optimizer), device=local_device())
    dist.all_reduce(count, dist.ReduceOp.MAX)  # a rank without trained weights counts no updates
    return {ADAM_STEP: count.item(), **({} if scale is None else scale.scalars())}


def files_of(
    local: LocalState, index: str, optimizer: MegatronOptimizer, groups: ProcessGroups
) -> dict[str, list[bytes | Tensor]]:
    """Return the content of the files with the state of this rank; `index` is the result of `index_of`."""
    files: dict[str, list[bytes | Tensor]] = {file_of_rank(groups.rank): [head_of(local.boxes), *local.values]}
    scalars = scalars_of(optimizer)
    return files if groups.rank else {**files, INDEX: [index_text(index, scalars).encode()]}


@torch.no_grad()
def load_state(
    directory: Path,
    shards: Sequence[MasterShard],
    ema: Optional[EMA],
    optimizer: MegatronOptimizer,
    wrapped: Sequence[Any],
    groups: ProcessGroups,
) -> None:
    """Read the state that any layout wrote into master weights, averages, optimizer and model."""
    reader = StateReader(directory)
    for i, shard in enumerate(shards):
        shard.ensure_state()
        owned = part_of(shard.parameter, groups, shard.start, shard.stop)
        for slot, target in _values(shards, ema, i).items():
            reader.read(f"{slot}.{shard.name}", owned.shape, owned.views(target, shard.start))
    set_step_count(optimizer, int(reader.scalars[ADAM_STEP]))
    scale = loss_scale_of(optimizer)
    if scale is not None:
        scale.load(reader.scalars)
    copy_masters_to_model(optimizer, wrapped)


@torch.no_grad()
def load_masters(weights: Weights, shards: Sequence[MasterShard], groups: ProcessGroups) -> None:
    """Read this rank's ranges of the weights into the master weights, on any layout."""
    for shard in shards:
        owned = part_of(shard.parameter, groups, shard.start, shard.stop)
        weights.read(shard.name, owned.shape, owned.views(shard.main, shard.start))


@torch.no_grad()
def load_weights(
    weights: Weights, chunks: Sequence[nn.Module], groups: ProcessGroups, *, frozen: Optional[bool] = None
) -> None:
    """Read the weights into unwrapped model chunks, on any layout.

    Args:
        frozen: read only frozen parameters, or only trained ones; None for all.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if frozen is None or frozen != parameter.requires_grad:
                part = part_of(parameter, groups)
                weights.read(name, part.shape, part.views(parameter, 0))
