"""Blocks of rows for kernels that add up over tokens: each lies inside one segment, so that its sums need no mask.

Samples of 5, 2 and 4 tokens in blocks of up to 3 rows:

    token    0 1 2 3 4 | 5 6 | 7 8 9 10
    block    0 0 0 1 1 | 2 2 | 3 3 3 4

    table    (0, 3, 0) (3, 2, 0) (5, 2, 1) (7, 3, 2) (10, 1, 2)      first row, rows, segment
    offsets  0 2 3 5                                                first block of each segment

The sums of a segment are those of its blocks, added in the order of the table: no atomics, the same bits every time.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dit.layout import SequenceLayout

MOST_ROWS, FEWEST_ROWS = 64, 8
ENOUGH_BLOCKS = 128
"""About as many as a large GPU has multiprocessors."""
BLOCKS_OF_PICTURE = 4
"""Of a small picture at least, as long as its blocks have rows."""
ROWS_OF_TILES = 128
"""Rows of a block where a program has some columns only, so that there are enough of them."""
GROUPS = 4
"""Groups of heads of a program."""
FORWARD_ROWS = 8
"""Without sums, short blocks cost nothing."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def rows_of_blocks(tokens: int) -> int:
    """Return how many rows a block of sums has: many, so that few sums are written, in enough blocks for a GPU."""
    rows = MOST_ROWS
    while rows > FEWEST_ROWS and tokens < rows * ENOUGH_BLOCKS:
        rows //= 2
    return rows


def rows_of_pictures(positions: int) -> int:
    """Return how many positions a block of a picture has; whatever other pictures there are, so that sums are equal."""
    rows = MOST_ROWS
    while rows > FEWEST_ROWS and positions < BLOCKS_OF_PICTURE * rows:
        rows //= 2
    return rows


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows inside segments, sorted by segment.

    Attributes:
        table: first row, number of rows, segment; int32 `[B, 3]`.
        offsets: first block of each segment, and the number of blocks; int32 `[S + 1]`.
    """

    table: Tensor
    offsets: Tensor


def blocks_of(layout: SequenceLayout, rows: int) -> Blocks:
    """Return the blocks of a layout's local tokens, computed once for each layout.

    Args:
        rows: of a block, at most.
    """
    known = layout.tables.get(rows)
    if known is None:
        known = layout.tables[rows] = _blocks(layout, rows)
    assert isinstance(known, Blocks)
    return known


def _blocks(layout: SequenceLayout, rows: int) -> Blocks:
    table = [
        (first, min(rows, start + length - first), segment)
        for segment, start, length in sorted(layout.segment_runs)
        for first in range(start, start + length, rows)
    ]
    counts = [0] * layout.num_samples
    for _, _, segment in table:
        counts[segment] += 1
    offsets = tuple(accumulate(counts, initial=0))
    return Blocks(
        torch.tensor(table, dtype=torch.int32, device=layout.device).view(-1, 3),
        torch.tensor(offsets, dtype=torch.int32, device=layout.device),
    )
