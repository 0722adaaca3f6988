"""Packs of a step dealt over data-parallel ranks by their work, because ranks wait for the busiest one.

Two ranks with two packs each, by FLOPs:

    read    rank 0: 9 + 8    rank 1: 2 + 1     the step lasts 17
    dealt   rank 0: 9 + 1    rank 1: 8 + 2     the step lasts 10

Ranks wait for each other at the end of a step and, if weights are sharded (FSDP), in every layer. Each rank therefore
computes its packs in descending order of their work, so that packs of similar work run at the same time.

Every rank reads its packs from the data streams and sends those that another rank computes, so the positions in the
streams, the samples of a step and their noise do not depend on the dealing.
"""

import heapq
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dit.backends.process_groups import ProcessGroups, host_group
from dit.batch import PackedBatch


class Packs(Protocol):
    """Packs of one rank, one after the other."""

    def __next__(self) -> PackedBatch: ...


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the packs of each rank, equally many, in the order in which it computes them.

    Packs go to the rank with the least work so far, the most expensive pack first. Then the busiest and the idlest rank
    exchange one pack each while this brings their work closer together. If the largest work is not lower than before,
    every rank keeps the packs that it reads. Rank 0 begins with pack 0, whose tokens set the loss scale of fp16.

    Args:
        costs: work of each pack of the step. Rank r reads packs r, r + ranks, r + 2 ranks, ...
        ranks: number of ranks, a divisor of the number of packs.

    Source: adapted from Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (longest processing time first).
    """
    count = len(costs) // ranks
    loads = [(0, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for pack in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(pack)
        if len(dealt[rank]) < count:
            heapq.heappush(loads, (load + costs[pack], rank))
    work = [sum(costs[i] for i in packs) for packs in dealt]
    while _swap(dealt, work, costs):
        pass
    read = [list(range(rank, len(costs), ranks)) for rank in range(ranks)]
    shares = sorted(map(sorted, dealt)) if max(work) < max(sum(costs[i] for i in packs) for packs in read) else read
    return [sorted(packs, key=lambda i: (i != 0, -costs[i])) for packs in shares]


def _swap(shares: Sequence[list[int]], work: list[int], costs: Sequence[int]) -> bool:
    """Exchange a pack of the busiest rank and one of the idlest, if this brings their work closer together.

    Args:
        work: of each rank; updated.
    """
    busy, idle = work.index(max(work)), work.index(min(work))
    busiest, idlest, gap = shares[busy], shares[idle], work[busy] - work[idle]
    new_gap, pack, other = min((abs(2 * (costs[i] - costs[k]) - gap), i, k) for i in busiest for k in idlest)
    if new_gap < gap:
        busiest[busiest.index(pack)], idlest[idlest.index(other)] = other, pack
        moved = costs[pack] - costs[other]
        work[busy] -= moved
        work[idle] += moved
    return new_gap < gap


def balanced(stream: Packs, cost: Callable[[PackedBatch], int], micro_batches: int, groups: ProcessGroups) -> Packs:
    """Return the packs that this rank computes (collective over all ranks).

    With one pack per rank and step, nothing is dealt.
    """
    if groups.dp_size == 1 or micro_batches == 1:
        return stream
    return BalancedPacks(stream, cost, micro_batches, host_group(groups.dp))


class BalancedPacks:
    """The packs of one rank, dealt step by step.

    Args:
        stream: packs that this rank reads.
        cost: returns the work of a pack.
        micro_batches: packs of each rank in a step.
        group: data-parallel ranks, as a group for tensors in host memory.

    Attributes:
        read: packs that this rank read for the newest step, before they were dealt.
    """

    read: Sequence[PackedBatch] = ()

    def __init__(
        self,
        stream: Packs,
        cost: Callable[[PackedBatch], int],
        micro_batches: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._stream, self._cost, self._micro_batches, self._group = stream, cost, micro_batches, group
        self._step: deque[PackedBatch] = deque()

    def __next__(self) -> PackedBatch:
        if not self._step:
            self._step.extend(self._next_step())
        return self._step.popleft()

    def _next_step(self) -> list[PackedBatch]:
        rank, ranks = self._group.rank(), self._group.size()
        self.read = read = [next(self._stream) for _ in range(self._micro_batches)]
        costs = torch.empty(ranks * len(read), dtype=torch.int64)
        dist.all_gather_into_tensor(costs, torch.tensor([self._cost(pack) for pack in read]), group=self._group)
        dealt = deal(costs.view(ranks, -1).T.flatten().tolist(), ranks)
        local = {rank + i * ranks: pack for i, pack in enumerate(read)}
        if any(i % ranks != receiver for receiver, packs in enumerate(dealt) for i in packs):
            sent = [[(i, local[i]) for i in packs if i in local] for packs in dealt]
            local = dict(exchange(sent, self._group))
        return [local[i] for i in dealt[rank]]


def exchange(
    sent: Sequence[Sequence[tuple[int, PackedBatch]]], group: dist.ProcessGroup
) -> list[tuple[int, PackedBatch]]:
    """Send numbered packs to every rank of a group, and return the packs that all ranks sent to this one."""
    rank = group.rank()
    messages = [
        torch.frombuffer(bytearray(pickle.dumps(packs)), dtype=torch.uint8)
        if packs and receiver != rank
        else torch.empty(0, dtype=torch.uint8)
        for receiver, packs in enumerate(sent)
    ]
    sizes = torch.tensor([len(message) for message in messages])
    received_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(received_sizes, sizes, group=group)
    lengths: list[int] = received_sizes.tolist()
    received = torch.empty(sum(lengths), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(messages), lengths, sizes.tolist(), group=group)
    parts: list[Tensor] = list(received.split(lengths))
    packs = [pack for part in parts if len(part) for pack in pickle.loads(part.numpy().tobytes())]
    return [*sent[rank], *packs]
