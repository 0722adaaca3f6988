"""Noise levels inside the samples of a pack.

A sample may consist of several segments with their own noise level: a clean first frame and the other frames (image to
video), frames with a level each, a masked region in a clean picture, a picture to generate and a clean reference
picture. Time, modulation and loss weight are per segment; attention, conditions and noise stay per sample. The tokens
of a segment are contiguous in the pack, so a region may need several; positions are stored per token.

Sample a has a clean first frame of two tokens, sample b has one level (`.` is padding, which belongs to the last
segment of its sample):

    token      a0 a1 a2 a3 a4 .  b0 b1 b2 .       lengths (5, 3)       padded_lengths (6, 4)
    segment    0  0  1  1  1  1  2  2  2  2       lengths (2, 3, 3)    padded_lengths (2, 4, 4)
    numbers    CLEAN 0           0                counts (2, 1)

Shape suffixes: L segments with one noise level, T local tokens of the pack, S samples in the pack.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.errors import BatchError
from dit.layout import CLEAN, Levels, SequenceLayout
from dit.patchify import Grid, grid_positions

Segment = tuple[int, int]
"""Number of tokens, and level: `CLEAN`, 0 or n, see `dit.layout.Levels.numbers`."""


def first_frames_clean(grids: Sequence[Grid]) -> list[list[Segment]]:
    """Return segments for samples whose first frame of tokens is clean; a sample of one frame has no clean tokens.

    Args:
        grids: (t, h, w) of each sample in patches.
    """
    return [[(h * w, CLEAN), ((t - 1) * h * w, 0)] if t > 1 else [] for t, h, w in grids]


def unmasked_clean(mask_T: Tensor) -> list[Segment]:
    """Return segments of a sample whose unmasked tokens are clean; empty (one level) if all or no tokens are masked.

    Args:
        mask_T: bool, one entry for each token of the sample, in their order.
    """
    if mask_T.all() or not mask_T.any():
        return []
    masked, counts = torch.unique_consecutive(mask_T, return_counts=True)
    return [(count, 0 if is_masked else CLEAN) for is_masked, count in zip(masked.tolist(), counts.tolist())]


def reference_positions(reference: Grid, grid: Grid) -> Tensor:
    """Return the positions of the tokens of a reference, int64 `[tokens, 3]`: its frames follow those of the sample.

    Args:
        reference, grid: (t, h, w) of the reference and of the sample.
    """
    return grid_positions(reference) + torch.tensor([grid[0], 0, 0])


def time_of_samples(time_L: Tensor, batch: PackedBatch) -> tuple[Tensor, PackedBatch]:
    """Return the time of each sample `[S]`, and the pack with one level per sample.

    For networks that modulate the clean tokens of a reference like the noised tokens of their sample.
    """
    levels = batch.layout.levels
    if levels is None:
        return time_L, batch
    if levels.numbers.count(0) != batch.layout.num_samples or not set(levels.numbers) <= {0, CLEAN}:
        raise BatchError(
            f"segments have the levels {levels.numbers}, but this network has one time per sample: each sample needs "
            f"one segment of level 0, and the others must be clean ({CLEAN})"
        )
    time_S = batch.layout.sum_levels(time_L.masked_fill(levels.clean_L, 0.0))
    return time_S, replace(batch, layout=replace(batch.layout, levels=None))


def with_levels(layout: SequenceLayout, segments: Sequence[Sequence[Segment]]) -> SequenceLayout:
    """Return the layout of a global pack with the noise levels of its samples.

    Args:
        segments: segments of each sample in the order of its tokens; empty for a sample with one level.
    """
    if not any(segments):
        return layout
    lengths, padded, numbers, counts = [], [], [], []
    for i, (parts, length, padded_length) in enumerate(
        zip(segments, layout.lengths, layout.padded_lengths, strict=True)
    ):
        parts = parts or [(length, 0)]
        tokens = [n for n, _ in parts]
        if sum(tokens) != length or min(tokens) < 1 or all(number == CLEAN for _, number in parts):
            raise BatchError(
                f"sample {i} has {length} tokens and segments (tokens, level) of {list(parts)}; the segments must "
                f"cover all tokens, have at least one each, and not all be clean ({CLEAN})"
            )
        lengths += tokens
        padded += [*tokens[:-1], tokens[-1] + padded_length - length]
        numbers += [number for _, number in parts]
        counts.append(len(parts))
    finer = SequenceLayout(tuple(lengths), tuple(padded), layout.total_tokens, layout.device)
    return replace(layout, levels=Levels(finer, tuple(counts), tuple(numbers)))
