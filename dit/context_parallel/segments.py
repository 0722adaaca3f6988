"""Attention segments smaller than samples: frames of a clip (spatial attention), or columns in time (temporal).

The tokens of a sample of (t, h, w) patches are ordered with time slowest. Spatial attention has t segments of h * w
adjacent tokens. Temporal attention has h * w segments of t tokens with a stride of h * w. A clip of t = 3 frames with
h * w = 2 patches:

    token          0   1   2   3   4   5
    (frame, patch) 00  01  10  11  20  21
    spatial        [0   1] [2   3] [4   5]           3 segments of 2 tokens
    temporal       [0   2   4] [1   3   5]           2 segments of 3 tokens, as a permutation of the pack

Both are variable-length attention over a permuted pack. Padding belongs to no segment.

Shape suffixes: V real tokens of the pack, ordered by segment; K segments; R context-parallel ranks.
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
    """The segments of one pack, on the host, all int64.

    Attributes:
        indices_V: indices of the real tokens in the pack, ordered by segment.
        segment_V: segment of each token.
        positions_V3: (t, h, w) patch index of each token.
    """

    indices_V: Tensor
    segment_V: Tensor
    positions_V3: Tensor
    lengths_K: Tensor


@lru_cache(maxsize=32)
def _segments(lengths: tuple[int, ...], starts: tuple[int, ...], grids: Grids, kind: AttentionKind) -> Segments:
    indices, positions, counts = [], [], []
    for length, start, (t, h, w) in zip(lengths, starts, grids, strict=True):
        if t * h * w != length:
            raise BatchError(f"a sample of {length} tokens cannot have a grid of {t} x {h} x {w} = {t * h * w} patches")
        index = torch.arange(length).view(t, h * w)
        index = (index.T if kind == "temporal" else index).flatten()
        indices.append(start + index)
        positions.append(torch.stack([index // (h * w), index // w % h, index % w], 1))
        segments, size = {"full": (1, length), "spatial": (t, h * w), "temporal": (h * w, t)}[kind]
        counts.append(torch.full((segments,), size))
    lengths_K = torch.cat(counts)
    segment_V = torch.repeat_interleave(torch.arange(len(lengths_K)), lengths_K)
    return Segments(torch.cat(indices), segment_V, torch.cat(positions), lengths_K)


def segments_of(layout: SequenceLayout, grids: Grids, kind: AttentionKind) -> Segments:
    """Return the segments of the global pack that `layout` belongs to; cached, so that all layers share one object."""
    return _segments(layout.lengths, layout.starts, grids, kind)


def assign_owners(lengths_K: Tensor, counts_KR: Tensor) -> Tensor:
    """Select the rank that attends to each segment, which balances the tokens first and then minimises communication.

    A greedy assignment, longest segment first (longest processing time first, LPT). A segment goes to the rank that has
    most of its tokens, if that rank stays within an equal part of all tokens; otherwise to the rank with the next
    largest number; if no rank has room, to the least loaded rank. Identical segments on the same rank stay contiguous.

    Args:
        counts_KR: number of tokens of each segment that are local to each rank, int64.

    Returns:
        The rank of each segment, int64 `[K]`; equal on every rank, because it depends only on the pack.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies" (LPT), with a preference for local tokens added.
    """
    size = counts_KR.shape[1]
    share = -(-int(lengths_K.sum()) // size)
    owner_K, load = torch.empty_like(lengths_K), [0] * size
    groups = sorted(_identical_segments(lengths_K, counts_KR), key=lambda group: (-group[0], -max(group[1])))
    for length, local, members in groups:
        assigned = [0] * size
        left = len(members)
        for count in sorted(set(local), reverse=True):
            ranks = [r for r in range(size) if local[r] == count]
            left = _assign_least_loaded(left, length, ranks, load, assigned, share)
        _assign_least_loaded(left, length, sorted(range(size), key=lambda r: -local[r]), load, assigned, None)
        owner_K[members] = torch.repeat_interleave(torch.arange(size), torch.tensor(assigned))
    return owner_K


def _identical_segments(lengths_K: Tensor, counts_KR: Tensor) -> list[tuple[int, list[int], Tensor]]:
    """Group segments of equal length and equal local counts: (length, tokens on each rank, segments)."""
    group_K = torch.zeros_like(lengths_K)
    for number_K in counts_KR.T:  # the length is the sum of the counts and need not be compared
        # Column by column, because `unique` over matrix rows is slow for tens of thousands of segments.
        _, group_K = (group_K * (int(number_K.max()) + 1) + number_K).unique(return_inverse=True)
    groups = group_K.argsort(stable=True).split(group_K.bincount().tolist())
    return [(int(lengths_K[members[0]]), counts_KR[members[0]].tolist(), members) for members in groups]


def _assign_least_loaded(
    count: int, length: int, ranks: list[int], load: list[int], assigned: list[int], share: int | None
) -> int:
    """Assign up to `count` segments to the least loaded of `ranks`, up to `share`; return the number left."""
    if share is not None and len(ranks) == 1:
        fits = min(count, max(0, share - load[ranks[0]]) // length)
        load[ranks[0]] += fits * length
        assigned[ranks[0]] += fits
        return count - fits
    waiting = [(load[rank], order, rank) for order, rank in enumerate(ranks)]
    heapq.heapify(waiting)
    while count and waiting and (share is None or waiting[0][0] + length <= share):
        _, order, rank = waiting[0]
        load[rank] += length
        assigned[rank] += 1
        count -= 1
        heapq.heapreplace(waiting, (load[rank], order, rank))
    return count
