"""Packs whose samples have several noise levels."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dit.batch import PackedBatch
from dit.layout import CLEAN
from dit.levels import Segment, reference_positions, unmasked_clean, with_levels
from dit.patchify import grid_positions


def segments_of(number: int, tokens: int) -> list[Segment]:
    """Return one of five segmentations: clean start, one level, two levels, clean middle, mask."""
    first, second = max(1, tokens // 3), max(1, tokens // 4)
    return {
        0: [(first, CLEAN), (tokens - first, 0)],
        1: [],
        2: [(first, 0), (tokens - first, 1)],
        3: [(first, 0), (second, CLEAN), (tokens - first - second, 2)],
        4: unmasked_clean(torch.arange(tokens) % 5 < 2),
    }[number % 5]


def leveled(batch: PackedBatch) -> PackedBatch:
    """Give the samples of a pack several noise levels, by the id of the sample."""
    ids = batch.sample_ids_S.tolist()
    segments = [segments_of(number, tokens) for number, tokens in zip(ids, batch.layout.lengths)]
    return replace(batch, layout=with_levels(batch.layout, segments))


def edited(batch: PackedBatch) -> PackedBatch:
    """Make the last rows of two of three pictures one or two references, by the id of the sample."""
    grids, references, segments, positions_T3 = [], [], [], batch.positions_T3.clone()
    for number, start, (t, h, w) in zip(batch.sample_ids_S.tolist(), batch.layout.starts, batch.grids):
        rows = max(1, h // 3) if number % 3 and h > 1 else 0
        first = max(1, w // 3) if number % 3 == 2 and w > 1 else w
        grid, columns = (t, h - rows, w), (first, w - first)
        grids.append(grid)
        references.append(tuple((t, rows, n) for n in columns if rows and n))
        segments.append([(math.prod(grid), 0), (t * rows * w, CLEAN)] if rows else [])
        positions_T3[start : start + t * h * w] = torch.cat(
            [grid_positions(grid), *reference_positions(references[-1], grid)]
        )
    return replace(
        batch,
        positions_T3=positions_T3,
        grids=tuple(grids),
        reference_grids=tuple(references),
        layout=with_levels(batch.layout, segments),
    )


@dataclass(frozen=True)
class LeveledPacks:
    """`launch.verify.MockPacks` whose samples have several noise levels."""

    packs: Any
    change: Callable[[PackedBatch], PackedBatch] = leveled

    def __call__(self, numbers: Sequence[int], *, multiple_of: int = 1, tail: int = 0) -> PackedBatch:
        return self.change(self.packs(numbers, multiple_of=multiple_of, tail=tail))


@dataclass(frozen=True)
class LeveledStream:
    """A stream of `dit.verify.trial.Trial` whose samples have several noise levels."""

    stream: Any
    change: Callable[[PackedBatch], PackedBatch] = leveled

    def __call__(self, dp_rank: int, dp_size: int, token_multiple: int) -> Iterator[PackedBatch]:
        return map(self.change, self.stream(dp_rank, dp_size, token_multiple))
