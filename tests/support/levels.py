"""Packs whose samples have several noise levels."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dit.batch import PackedBatch
from dit.layout import CLEAN
from dit.levels import Segment, unmasked_clean, with_levels


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
