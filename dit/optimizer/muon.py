"""Muon on any layout: the direction of a weight needs all of it, but a rank may have only a part.

Each weight has an owner, one of the ranks that have a part of it. Owners are assigned once, so that each rank has about
the same number of operations. A step has two exchanges per round of weights:

    rank 0   part of A --.                                  .--> part of the direction of A
                         +--> owner of A: all of A --> NS --+                                      NS: `kernels.muon`
    rank 1   part of A --'                                  '--> part of the direction of A

Of several ranks with the same part, one sends it, and all receive the direction. A weight of which one rank has all
is not sent.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dit.backends.device import local_device
from dit.backends.process_groups import ProcessGroups, gather_objects
from dit.backends.sharding import Matrices
from dit.boxes import Box, Part
from dit.kernels import muon
from dit.kernels.adamw import Elements, Rates
from dit.optimizer.master_weights import MasterShard, part_of

ROUND_ELEMENTS = 1 << 25
"""Elements per rank that are exchanged at the same time: in bf16, 64 MiB for each of the two exchanges."""


@dataclass(frozen=True)
class Weight:
    """A weight that Muon updates.

    Attributes:
        shape: the unsharded shape.
        parts: part of each rank of the group that has one.
        sources: ranks whose parts make up the weight, without copies.
        owner: the rank that computes the direction.
    """

    name: str
    shape: tuple[int, ...]
    matrices: Matrices
    parts: Mapping[int, Part]
    sources: Sequence[int]
    owner: int


def operations(shape: Sequence[int], matrices: Matrices) -> int:
    """Return the floating-point operations of the direction of a weight."""
    total = 0
    for view in matrices.views(torch.empty(tuple(shape), device="meta")):
        short, long = sorted(view.flatten(0, 1).shape)
        total += muon.STEPS * (4 * short * short * long + 2 * short**3)
    return total


def assign(tables: Sequence[Mapping[str, tuple[Part, Matrices]]]) -> list[Weight]:
    """Assign an owner to each weight, those with most operations first; `tables` has the parts of each rank by name."""
    parts: dict[str, dict[int, Part]] = {}
    matrices: dict[str, Matrices] = {}
    for rank, table in enumerate(tables):
        for name, (part, own) in table.items():
            parts.setdefault(name, {})[rank] = part
            matrices[name] = own
    shapes = {name: next(iter(of_ranks.values())).shape for name, of_ranks in parts.items()}
    costs = {name: operations(shape, matrices[name]) for name, shape in shapes.items()}
    loads, weights = [0] * len(tables), []
    for name in sorted(parts, key=lambda name: (-costs[name], name)):
        owner = min(parts[name], key=lambda rank: (loads[rank], rank))
        loads[owner] += costs[name]
        first = {parts[name][rank]: rank for rank in (*reversed(parts[name]), owner)}
        weights.append(Weight(name, shapes[name], matrices[name], parts[name], sorted(first.values()), owner))
    return weights


def in_rounds(weights: Sequence[Weight], most: int) -> list[list[Weight]]:
    """Split weights into rounds of at most `most` elements; a larger weight has its own round."""
    rounds: list[list[Weight]] = []
    room = 0
    for weight in weights:
        size = torch.Size(weight.shape).numel()
        if size > room:
            rounds.append([])
            room = most
        rounds[-1].append(weight)
        room -= size
    return rounds


def direction(update_OI: Tensor, matrices: Matrices) -> Tensor:
    """Return the direction of an unsharded weight, each of its matrices separately."""
    result = torch.empty_like(update_OI)
    for source, target in zip(matrices.views(update_OI), matrices.views(result)):
        target.copy_(muon.direction(source.flatten(0, 1)).view(target.shape))
    return result


class Muon:
    """Update of the local parts of the weights of blocks; every rank creates and calls it.

    `dtype` is the precision of exchanged updates and of directions.
    """

    def __init__(self, shards: Sequence[MasterShard], groups: ProcessGroups, decay: float, dtype: torch.dtype) -> None:
        self.group, self.decay, self.dtype = groups.stage, decay, dtype
        table = {
            shard.name: (part_of(shard.parameter, groups, shard.start, shard.stop), shard.matrices)
            for shard in shards
            if shard.matrices is not None and shard.start < shard.stop
        }
        self.rounds = in_rounds(assign(gather_objects(table, self.group)), ROUND_ELEMENTS * self.group.size())

    def __call__(self, local: Mapping[str, tuple[Elements, Rates]]) -> None:
        """Update this rank's parts of all weights, with their rates."""
        for weights in self.rounds:
            names = [weight.name for weight in weights if weight.name in local]
            updates = {name: muon.momentum(*local[name], self.decay).to(self.dtype) for name in names}
            for name, values in self._directions(weights, updates):
                muon.apply(*local[name], values)

    def _directions(self, weights: Sequence[Weight], updates: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the local part of each direction, flat."""
        rank, ranks = self.group.rank(), range(self.group.size())
        owned = [weight for weight in weights if weight.owner == rank]
        local = [weight for weight in weights if rank in weight.parts]
        sent = [[updates[w.name] for w in local if w.owner == other and rank in w.sources] for other in ranks]
        sizes = [[w.parts[other].size for w in owned if other in w.sources] for other in ranks]
        is_exchanged = any(len(weight.parts) > 1 for weight in weights)
        received = [iter(values) for values in (self._exchange(sent, sizes) if is_exchanged else sent)]
        directions = {}
        for weight in owned:
            parts = {other: next(received[other]) for other in weight.sources}
            directions[weight.name] = direction(_joined(weight, parts), weight.matrices)
        sent = [[_cut(directions[w.name], w.parts[other]) for w in owned if other in w.parts] for other in ranks]
        sizes = [[w.parts[rank].size for w in local if w.owner == other] for other in ranks]
        returned = self._exchange(sent, sizes) if is_exchanged else sent
        for other in ranks:
            yield from zip([w.name for w in local if w.owner == other], returned[other], strict=True)

    def _exchange(self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]) -> list[Sequence[Tensor]]:
        """Send flat tensors to each rank; return those from each rank, which have these sizes."""
        device = local_device()
        outgoing = torch.cat([torch.empty(0, dtype=self.dtype, device=device), *itertools.chain(*sent)])
        incoming = outgoing.new_empty(sum(map(sum, sizes)))
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        dist.all_to_all_single(incoming, outgoing, list(map(sum, sizes)), counts, group=self.group)
        parts = iter(incoming.split(list(itertools.chain(*sizes))))
        return [list(itertools.islice(parts, len(from_rank))) for from_rank in sizes]


def _joined(weight: Weight, parts: Mapping[int, Tensor]) -> Tensor:
    """Return the unsharded tensor that consists of flat parts, by rank."""
    result = next(iter(parts.values())).new_empty(weight.shape)
    for rank, values in parts.items():
        part = weight.parts[rank]
        for box, view in part.views(values, part.start):
            result[box.slices_in(Box.of(weight.shape))] = view
    return result


def _cut(tensor: Tensor, part: Part) -> Tensor:
    """Return a part of an unsharded tensor, flat."""
    result = tensor.new_empty(part.size)
    for box, view in part.views(result, part.start):
        view.copy_(tensor[box.slices_in(Box.of(part.shape))])
    return result
