"""Segments finer than samples: the frames of a clip for spatial attention, its columns through time for temporal.

A sample of (t, h, w) patches lies time slowest. Spatial attention has t segments of h * w rows that lie side by side;
temporal attention has h * w segments of t rows, each h * w apart. Both are attention over segments of a pack whose rows
lie in another order. Padding rows belong to no segment.

Shape suffixes: V real rows of the pack, segment after segment; K segments; R context-parallel ranks.
"""

import heapq
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from dit.errors import BatchError
from dit.layout import SequenceLayout

AttentionKind = Literal["full", "spatial", "temporal"]
Grids = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of one pack, on the host.

    Attributes:
        rows_V: the real rows of the pack, segment after segment.
        segment_V: segment of each of them.
        positions_V3: (t, h, w) patch index of each of them.
        lengths_K: rows of each segment.
    """

    rows_V: Tensor
    segment_V: Tensor
    positions_V3: Tensor
    lengths_K: Tensor


@lru_cache(maxsize=32)
def _segments(lengths: tuple[int, ...], starts: tuple[int, ...], grids: Grids, kind: AttentionKind) -> Segments:
    rows, positions, counts = [], [], []
    for length, start, (t, h, w) in zip(lengths, starts, grids, strict=True):
        if t * h * w != length:
            raise BatchError(f"a sample of {length} tokens cannot have a grid of {t} x {h} x {w} = {t * h * w} patches")
        index = torch.arange(length).view(t, h * w)
        index = (index.T if kind == "temporal" else index).flatten()
        rows.append(start + index)
        positions.append(torch.stack([index // (h * w), index // w % h, index % w], 1))
        segments, size = {"full": (1, length), "spatial": (t, h * w), "temporal": (h * w, t)}[kind]
        counts.append(torch.full((segments,), size))
    lengths_K = torch.cat(counts)
    segment_V = torch.repeat_interleave(torch.arange(len(lengths_K)), lengths_K)
    return Segments(torch.cat(rows), segment_V, torch.cat(positions), lengths_K)


def segments_of(layout: SequenceLayout, grids: Grids, kind: AttentionKind) -> Segments:
    """Return the segments of the whole pack that `layout` is a part of; every layer of a step gets the same object.

    Raises:
        BatchError: a grid does not have the tokens of its sample.
    """
    return _segments(layout.lengths, layout.starts, grids, kind)


def assign_owners(lengths_K: Tensor, held_KR: Tensor) -> Tensor:
    """Choose the rank that gets each segment whole: equal shares of rows first, then few rows that must move.

    Segments go, the longest first, to the rank that holds most of them and has room in an equal share of all rows; what
    fits nowhere goes where the load is least. Like segments that go to one rank stay neighbours.

    Args:
        lengths_K: rows of each segment.
        held_KR: how many of them each rank holds.

    Returns:
        The rank of each segment, int64 `[K]`; the same on every rank, for it follows from the pack alone.
    """
    size = held_KR.shape[1]
    share = -(-int(lengths_K.sum()) // size)
    owner_K, load = torch.empty_like(lengths_K), [0] * size
    for length, held, own in sorted(_alike(lengths_K, held_KR), key=lambda group: (-group[0], -max(group[1]))):
        given = [0] * size
        left = len(own)
        for level in sorted(set(held), reverse=True):
            left = _hand_out(left, length, [r for r in range(size) if held[r] == level], load, given, share)
        _hand_out(left, length, sorted(range(size), key=lambda r: -held[r]), load, given, None)
        owner_K[own] = torch.repeat_interleave(torch.arange(size), torch.tensor(given))
    return owner_K


def _alike(lengths_K: Tensor, held_KR: Tensor) -> list[tuple[int, list[int], Tensor]]:
    """Group segments of one length that are held alike: (length, held by each rank, segments)."""
    group_K = torch.zeros_like(lengths_K)
    for number_K in held_KR.T:  # the length follows, for it is their sum
        # One column after the other: packs have tens of thousands of segments, whose rows are slow to compare.
        _, group_K = (group_K * (int(number_K.max()) + 1) + number_K).unique(return_inverse=True)
    members = group_K.argsort(stable=True).split(group_K.bincount().tolist())
    return [(int(lengths_K[own[0]]), held_KR[own[0]].tolist(), own) for own in members]


def _hand_out(count: int, length: int, ranks: list[int], load: list[int], given: list[int], share: int | None) -> int:
    """Give up to `count` segments to the least loaded of `ranks`, none beyond `share`; return how many are left."""
    if share is not None and len(ranks) == 1:
        fits = min(count, max(0, share - load[ranks[0]]) // length)
        load[ranks[0]] += fits * length
        given[ranks[0]] += fits
        return count - fits
    waiting = [(load[rank], order, rank) for order, rank in enumerate(ranks)]
    heapq.heapify(waiting)
    while count and waiting and (share is None or waiting[0][0] + length <= share):
        _, order, rank = waiting[0]
        load[rank] += length
        given[rank] += 1
        count -= 1
        heapq.heapreplace(waiting, (load[rank], order, rank))
    return count
