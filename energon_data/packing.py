"""Choose which samples share a pack, and lay the chosen ones side by side as a `PackedBatch`."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Optional

import torch
from torch import Tensor

from dit.batch import DEFAULT_FPS, PackedBatch
from dit.data_api import BatchSpec
from dit.layout import SequenceLayout
from dit.patchify import Grid, grid_positions, patchify
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


def _tokens(clips: Sequence[Clip], spec: BatchSpec) -> Tensor:
    """Patchify all latents, `[sum of tokens, C]`, one call for each run of clips of one picture size."""
    pieces = []
    for _, run in groupby(clips, key=lambda c: (c.latent.shape[0], c.latent.shape[2:])):
        latents = [c.latent for c in run]
        # Time is the slowest axis of the token order, so clips joined in time give their tokens one after the other.
        joined = latents[0] if len(latents) == 1 else torch.cat(latents, 1)
        pieces.append(patchify(joined, spec.patch_temporal, spec.patch_spatial)[0])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _spread(rows: Tensor, layout: SequenceLayout) -> Tensor:
    """Put each sample's rows at its place in the layout; padding rows are zero."""
    if layout.total_tokens == len(rows):
        return rows
    out = rows.new_zeros(layout.total_tokens, *rows.shape[1:])
    at = start = 0
    for length, padded in zip(layout.lengths, layout.padded_lengths):
        out[at : at + length] = rows[start : start + length]
        at, start = at + padded, start + length
    return out


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
    context = context_layout = None
    if spec.context_size is not None:
        texts = [c.text for c in clips if c.text is not None]
        context = texts[0] if len(texts) == 1 else torch.cat(texts)
        context_layout = SequenceLayout.from_lengths([len(t) for t in texts])
    weights = [c.loss_weight for c in clips]
    return PackedBatch(
        latents_TC=_spread(_tokens(clips, spec), layout),
        positions_T3=_spread(torch.cat([_positions(c.grid) for c in clips]), layout),
        layout=layout,
        sample_ids_S=torch.tensor([c.id for c in clips], dtype=torch.int64),
        grids=tuple(c.grid for c in clips),
        keys=tuple(c.__key__ for c in clips),
        labels_S=None if spec.num_classes is None else torch.tensor([c.label for c in clips], dtype=torch.int64),
        context_KD=context,
        context_layout=context_layout,
        pooled_SD=None if spec.pooled_size is None else torch.stack([c.pooled for c in clips if c.pooled is not None]),
        fps_S=torch.tensor([DEFAULT_FPS if c.fps is None else c.fps for c in clips]),
        loss_weight_S=None if all(w == 1.0 for w in weights) else torch.tensor(weights),
    )
