"""Choose which samples share a pack, and lay the chosen ones side by side as a `PackedBatch`."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import pack_conditions
from dit.data_api import BatchSpec
from dit.layout import SequenceLayout
from dit.patchify import Grid, grid_positions, patchify_all
from energon_data.samples import Clip


def padded_length(length: int, multiple_of: int) -> int:
    """Return `length` rounded up to a multiple."""
    return -(-length // multiple_of) * multiple_of


def greedy_knapsack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins, each time taking the longest item that still fits into the open bin.

    Every item lands in exactly one bin and no bin exceeds the capacity. O(n log n) searches.

    Args:
        lengths: length of each item, each at most `capacity`.
        capacity: most tokens per bin.

    Returns:
        Item numbers of each bin.
    """
    # Longest last, and of equal ones the first item last, so that it is taken first.
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    sizes = [lengths[i] for i in order]
    if sizes and sizes[-1] > capacity:
        raise ValueError(
            f"an item of {sizes[-1]} tokens does not fit into a pack of {capacity}; drop it before packing"
        )
    bins = []
    while sizes:
        room, chosen = capacity, []
        while (at := bisect_right(sizes, room) - 1) >= 0:
            room -= sizes.pop(at)
            chosen.append(order.pop(at))
        bins.append(chosen)
    return bins


@lru_cache(maxsize=512)
def _positions(grid: Grid) -> Tensor:
    return grid_positions(grid)


def collate(clips: Sequence[Clip], spec: BatchSpec, *, total_tokens: Optional[int] = None) -> PackedBatch:
    """Lay clips side by side.

    Args:
        clips: encoded samples, in order.
        spec: patch sizes, padding, and which conditions the model takes.
        total_tokens: pad the pack to this many tokens; None for no tail.

    Raises:
        BatchError: the clips do not fit into `total_tokens`.
    """
    layout = SequenceLayout.from_lengths(
        [c.num_tokens for c in clips], multiple_of=spec.multiple_of, total_tokens=total_tokens
    )
    given = {condition.name: [clip.value(condition) for clip in clips] for condition in spec.conditions}
    weights = [c.loss_weight for c in clips]
    return PackedBatch(
        latents_TC=layout.insert_padding(patchify_all([c.latent for c in clips], *spec.patch)),
        positions_T3=layout.insert_padding(torch.cat([_positions(c.grid) for c in clips])),
        layout=layout,
        sample_ids_S=torch.tensor([c.id for c in clips], dtype=torch.int64),
        grids=tuple(c.grid for c in clips),
        keys=tuple(c.__key__ for c in clips),
        conditions=pack_conditions(spec.conditions, given, layout, spec.patch),
        loss_weight_S=None if all(w == 1.0 for w in weights) else torch.tensor(weights),
    )
