"""Selection of the samples of each pack, and their concatenation to a `PackedBatch`.

Samples are selected by lengths rounded up to `data.pack_multiple_of`, so that every layout selects the same
packs. The padding of the layout is added afterwards: `BatchSpec.multiple_of`, which divides `data.pack_multiple_of`.
Three clips of 5, 2 and 3 tokens, with `multiple_of` 2 and a pack length of 14 (`.` is padding):

    a0 a1 a2 a3 a4 . | b0 b1 | c0 c1 c2 . | . .      lengths (5, 2, 3), padded_lengths (6, 2, 4), total_tokens 14
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Optional

import torch

from dit.batch import PackedBatch, RawSamples
from dit.conditions import pack_conditions
from dit.data_api import BatchSpec
from dit.layout import SequenceLayout
from dit.levels import reference_positions
from dit.patchify import grid_positions, patchify_all
from energon_data.samples import Clip

BUFFERED = 256
"""Largest number of samples from which packs are filled, if `data.packing_buffer_size` is None."""
SPARE = 1.04
"""Capacity of balanced packs relative to their tokens; without it, the last items do not fit into cheap packs."""


def padded_length(length: int, multiple_of: int) -> int:
    """Return `length` rounded up to a multiple."""
    return -(-length // multiple_of) * multiple_of


@dataclass(frozen=True)
class CostLimit:
    """Limit of the work of a pack; a sample costs n + n^2 / `attention`, because attention is quadratic.

    Attributes:
        tokens: a pack costs at most what one sample of this many tokens costs.
        attention: length of a sample at which attention costs as much as everything else.
    """

    tokens: int
    attention: int

    def cost(self, length: int) -> int:
        """Return the cost of a sample, multiplied by `attention` so that it is an integer."""
        return length * (self.attention + length)

    @property
    def most(self) -> int:
        """Cost of a full pack."""
        return self.cost(self.tokens)


def buffer_limit(per_pass: int) -> int:
    """Return the size of equal parts of a pass of at most `BUFFERED` samples, or `BUFFERED` if it has no more."""
    return -(-max(per_pass, BUFFERED) // -(-per_pass // BUFFERED))


def greedy_knapsack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins: add the longest item that fits into the open bin, or open a new one.

    Every item is in exactly one bin, and no bin exceeds the capacity. O(n log n) searches.

    Returns:
        Item indices of each bin.
    """
    # Sort ascending; among equal lengths, the first item is last, so that it is used first.
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    sizes = [lengths[i] for i in order]
    _check_longest(sizes[-1:], capacity)
    bins = []
    while sizes:
        room, items = capacity, []
        while (at := bisect_right(sizes, room) - 1) >= 0:
            room -= sizes.pop(at)
            items.append(order.pop(at))
        bins.append(items)
    return bins


def balanced_packs(lengths: Sequence[int], capacity: int, limit: CostLimit) -> list[list[int]]:
    """Pack items into bins of nearly equal cost: each item, longest first, goes into the cheapest bin.

    Every item is in exactly one bin, and no bin exceeds the capacity or the limit. The number of bins is close to the
    minimum.

    Returns:
        Item indices of each bin.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies" (longest processing time first), with a capacity.
    """
    _check_longest(sorted(lengths)[-1:], min(capacity, limit.tokens))
    costs = [limit.cost(length) for length in lengths]
    count = max(math.ceil(SPARE * sum(lengths) / capacity), -(-sum(costs) // limit.most))
    bins: list[list[int]] = [[] for _ in range(count)]
    cheapest = [(0, 0, number) for number in range(count)]  # heap of (cost, tokens, bin)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        while cheapest and cheapest[0][1] + lengths[i] > capacity:
            heappop(cheapest)  # shorter items are unlikely to fit either
        if cheapest and cheapest[0][0] + costs[i] <= limit.most:
            cost, tokens, number = heappop(cheapest)
        else:
            cost, tokens, number = 0, 0, len(bins)
            bins.append([])
        bins[number].append(i)
        heappush(cheapest, (cost + costs[i], tokens + lengths[i], number))
    return [items for items in bins if items]


def _check_longest(longest: Sequence[int], most: int) -> None:
    if longest and longest[0] > most:
        raise ValueError(f"an item of {longest[0]} tokens does not fit into a pack of {most}; drop it before packing")


_positions = lru_cache(maxsize=512)(grid_positions)


def collate(clips: Sequence[Clip], spec: BatchSpec, *, total_tokens: Optional[int] = None) -> PackedBatch:
    """Concatenate clips into a pack.

    Args:
        total_tokens: pad the pack to this many tokens; None for no padding at the end.
    """
    layout = SequenceLayout.from_lengths(
        [c.num_tokens for c in clips], multiple_of=spec.multiple_of, total_tokens=total_tokens
    )
    parts = [part for c in clips for part in (c.latent, *c.references)]
    positions = [x for c in clips for x in (_positions(c.grid), *reference_positions(c.reference_grids, c.grid))]
    values = {condition.name: [clip.value(condition) for clip in clips] for condition in spec.conditions}
    weights = [c.loss_weight for c in clips]
    return PackedBatch(
        latents_TC=layout.insert_padding(patchify_all(parts, *spec.patch)),
        positions_T3=layout.insert_padding(torch.cat(positions)),
        layout=layout,
        sample_ids_S=torch.tensor([c.id for c in clips], dtype=torch.int64),
        grids=tuple(c.grid for c in clips),
        reference_grids=tuple(c.reference_grids for c in clips) if any(c.references for c in clips) else (),
        keys=tuple(c.__key__ for c in clips),
        conditions=pack_conditions(spec.conditions, values, layout, spec.patch),
        loss_weight_S=None if all(w == 1.0 for w in weights) else torch.tensor(weights),
        raw=_raw(clips),
    )


def _raw(clips: Sequence[Clip]) -> Optional[RawSamples]:
    """Return the inputs to encode on the training device; all clips of a data set have the same kinds of parts."""
    pixels = tuple(clip.pixels for clip in clips if clip.pixels is not None)
    captions = tuple(clip.caption for clip in clips if clip.caption is not None)
    return RawSamples(pixels or None, captions or None) if pixels or captions else None
