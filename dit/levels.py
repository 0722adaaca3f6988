"""Noise levels inside the samples of a pack.

A sample may consist of several segments with their own noise level: a clean first frame and the other frames (image to
video), frames with a level each, a masked region in a clean picture, a picture to generate and clean reference
pictures. Time, modulation and loss weight are per segment; attention, conditions and noise stay per sample. The tokens
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
from itertools import accumulate
from typing import Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.errors import BatchError
from dit.layout import CLEAN, Levels, SequenceLayout
from dit.patchify import Grid, grid_positions

Segment = tuple[int, int]
"""Number of tokens, and level: `CLEAN`, 0 or n, see `dit.layout.Levels.numbers`."""


def first_frames_clean(grids: Sequence[Grid]) -> list[list[Segment]]:
    """Return segments for samples whose first frame of tokens is clean; a sample of one frame has no clean tokens."""
    return [[(h * w, CLEAN), ((t - 1) * h * w, 0)] if t > 1 else [] for t, h, w in grids]


def unmasked_clean(mask_T: Tensor) -> list[Segment]:
    """Return segments of a sample whose unmasked tokens are clean; empty (one level) if all or no tokens are masked."""
    if mask_T.all() or not mask_T.any():
        return []
    masked, counts = torch.unique_consecutive(mask_T, return_counts=True)
    return [(count, 0 if is_masked else CLEAN) for is_masked, count in zip(masked.tolist(), counts.tolist())]


def reference_positions(references: Sequence[Grid], grid: Grid) -> list[Tensor]:
    """Return the positions of the tokens of each reference, int64 `[tokens, 3]`.

    The frames of the first reference follow those of the sample, the frames of each other one those of the previous.
    """
    starts = accumulate((frames for frames, _, _ in references), initial=grid[0])
    return [grid_positions(reference) + torch.tensor([start, 0, 0]) for reference, start in zip(references, starts)]


def with_references_at_sample_time(time_L: Tensor, batch: PackedBatch) -> tuple[Tensor, PackedBatch]:
    """Return times and a pack in which references have the level of the first noised segment of their sample.

    For networks that modulate the clean tokens of references like the noised tokens of their sample. Samples whose
    segments then all have one level get one time again. All references of a sample are its last segment.
    """
    levels = batch.layout.levels
    if levels is None or not batch.reference_grids:
        return time_L, batch
    numbers, sources = list(levels.numbers), list(range(len(levels.numbers)))
    ends = list(accumulate(levels.counts))
    for end, first, references in zip(ends, _first_noised(levels), batch.reference_grids):
        if references:
            numbers[end - 1], sources[end - 1] = numbers[first], first
    starts = [0, *ends[:-1]]
    has_one_level = all(len(set(numbers[start:end])) == 1 for start, end in zip(starts, ends))
    time_L = time_L[batch.layout.tensor(starts if has_one_level else sources)]
    levels = None if has_one_level else replace(levels, numbers=tuple(numbers))
    return time_L, replace(batch, layout=replace(batch.layout, levels=levels))


def with_text_level(time_L: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, PackedBatch]:
    """Return the time of each text, and times and a pack with a level for the text before the levels of each sample.

    A text has the level of the first noised segment of its sample. In the layout of the image, its segment is empty:

        image tokens   a0 a1 a2 a3 a4 b0 b1 b2       lengths (0, 2, 3, 0, 3)      first two tokens of a are clean
        text tokens    p0 p1 p2 q0 q1                lengths (3, 0, 0, 2, 0)      `at_text_level`
    """
    levels = batch.layout.levels
    if levels is None:
        return time_L, time_L, batch
    firsts = _first_noised(levels)
    order = _before_samples(range(len(levels.numbers)), firsts, levels.counts)
    extended = Levels(
        _with_empty_segments(levels.layout, levels.counts),
        tuple(count + 1 for count in levels.counts),
        tuple(levels.numbers[i] for i in order),
    )
    tensor = batch.layout.tensor
    return time_L[tensor(firsts)], time_L[tensor(order)], replace(batch, layout=replace(batch.layout, levels=extended))


def at_text_level(layout: SequenceLayout, levels: Optional[Levels]) -> SequenceLayout:
    """Return the layout of texts, or of other tokens with their level, with the levels of `with_text_level`."""
    if levels is None:
        return layout
    lengths, padded = [], []
    for count, length, padded_length in zip(levels.counts, layout.lengths, layout.padded_lengths, strict=True):
        lengths += [length, *[0] * (count - 1)]
        padded += [length, *[0] * (count - 2), padded_length - length]
    finer = SequenceLayout(tuple(lengths), tuple(padded), layout.total_tokens, layout.device)
    return replace(layout, levels=replace(levels, layout=finer))


def _first_noised(levels: Levels) -> list[int]:
    """Return the index of the first segment of each sample that is not clean."""
    ends = accumulate(levels.counts)
    return [
        next(i for i in range(end - count, end) if levels.numbers[i] != CLEAN)
        for end, count in zip(ends, levels.counts, strict=True)
    ]


def _before_samples(values: Sequence[int], added: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the values of all segments with another one before those of each sample."""
    ends = accumulate(counts)
    return [x for new, end, count in zip(added, ends, counts) for x in (new, *values[end - count : end])]


def _with_empty_segments(segments: SequenceLayout, counts: tuple[int, ...]) -> SequenceLayout:
    """Return the layout of segments with an empty one before those of each sample."""
    zeros = [0] * len(counts)
    return replace(
        segments,
        lengths=tuple(_before_samples(segments.lengths, zeros, counts)),
        padded_lengths=tuple(_before_samples(segments.padded_lengths, zeros, counts)),
        local=None if segments.local is None else _with_empty_segments(segments.local, counts),
    )


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
