"""Noise levels inside the samples of a pack.

A sample may consist of several segments with their own noise level: a clean first frame and the other frames (image to
video), frames with a level each, a picture to generate and a clean reference picture. Time, modulation and loss weight
are per segment; attention, conditions and noise stay per sample. Tokens of a segment are contiguous, wherever they are
in the picture, because their positions are values.

Sample a has a clean first frame of two tokens, sample b has one level (`.` is padding, which belongs to the last
segment of its sample):

    token      a0 a1 a2 a3 a4 .  b0 b1 b2 .       lengths (5, 3)       padded_lengths (6, 4)
    segment    0  0  1  1  1  1  2  2  2  2       lengths (2, 3, 3)    padded_lengths (2, 4, 4)
    numbers    CLEAN 0           0                counts (2, 1)

Shape suffixes: L segments with one noise level, T local tokens of the pack, S samples in the pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Optional

import torch
from torch import Tensor

from dit.errors import BatchError
from dit.layout import SequenceLayout

CLEAN = -1
"""Number of the level of clean tokens: t = 0 and no loss."""
Segment = tuple[int, int]
"""Tokens of a segment, and the number of its level in the sample."""


# Not frozen, like `SequenceLayout`.
@dataclass(unsafe_hash=True)
class Levels:
    """The noise levels of a pack whose samples have several.

    Attributes:
        layout: layout of the segments, in the place of samples.
        counts: number of segments of each sample, on the host.
        numbers: level of each segment, on the host: `CLEAN`, 0 for the level of the sample, n > 0 for the n-th of its
            other levels. Segments of a sample with equal numbers have the same level.
    """

    layout: SequenceLayout
    counts: tuple[int, ...]
    numbers: tuple[int, ...]

    @cached_property
    def by_sample(self) -> SequenceLayout:
        """Layout of the segments as tokens of their samples."""
        return SequenceLayout.from_lengths(self.counts, device=self.layout.device)

    @cached_property
    def numbers_L(self) -> Tensor:
        """Number of the level of each segment, int64."""
        return self.layout.tensor(self.numbers)

    @cached_property
    def clean_L(self) -> Tensor:
        """True for clean segments."""
        return self.numbers_L == CLEAN

    def to(self, device: torch.device | str) -> "Levels":
        """Move the index tensors to `device`."""
        return replace(self, layout=self.layout.to(device))

    def followed_by(self, other: "Levels") -> "Levels":
        """Return the levels of two packs concatenated."""
        layout = self.layout.followed_by(other.layout)
        return Levels(layout, self.counts + other.counts, self.numbers + other.numbers)

    def select(self, indices_T: Tensor, *, gathered: bool, window: Optional[tuple[int, int]]) -> "Levels":
        """Return the levels of some of the local tokens; arguments as for `SequenceLayout.select`."""
        local = None if gathered or self.layout.local_indices is not None else _local(self.layout, indices_T)
        return replace(self, layout=self.layout.select(indices_T, gathered=gathered, local=local, window=window))


def _local(layout: SequenceLayout, indices_T: Tensor) -> SequenceLayout:
    """Return the layout of some tokens of the global pack as a separate pack; segments may be empty."""
    full = SequenceLayout(layout.lengths, layout.padded_lengths, layout.total_tokens)
    indices_T = indices_T.cpu()
    ids_T = full.segment_ids_T[indices_T]
    lengths, padded = (
        tuple(torch.bincount(ids, minlength=full.num_samples).tolist())
        for ids in (ids_T[full.valid_T[indices_T]], ids_T)
    )
    return SequenceLayout(lengths, padded, len(indices_T), layout.device)


def with_levels(layout: SequenceLayout, segments: Sequence[Sequence[Segment]]) -> SequenceLayout:
    """Return the layout of a global pack with the noise levels of its samples.

    Args:
        segments: segments of each sample in the order of its tokens; empty for a sample with one level.

    Raises:
        BatchError: the segments of a sample do not cover its tokens, one is empty, or all are clean.
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
