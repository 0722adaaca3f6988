"""Blocks of rows for kernels that sum over tokens. Each block is inside one segment, so its sums need no mask.

Samples of 5, 2 and 4 tokens in blocks of up to 3 rows:

    token    0 1 2 3 4 | 5 6 | 7 8 9 10
    block    0 0 0 1 1 | 2 2 | 3 3 3 4

    table    (0, 3, 0) (3, 2, 0) (5, 2, 1) (7, 3, 2) (10, 1, 2)      first row, rows, segment
    offsets  0 2 3 5                                                first block of each segment

The sums of a segment's blocks are added in the order of the table, without atomics, so results are deterministic.
"""

import os
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Optional

import torch
from torch import Tensor

from dit.layout import SequenceLayout

MOST_ROWS, FEWEST_ROWS = 64, 8
WIDE = 2048
"""Width from which the registers of a multiprocessor suffice for one or two programs with sums; below, for four."""
BLOCKS_OF_PICTURE = 4
"""Smallest number of blocks per picture, unless blocks would have fewer than `FEWEST_ROWS` rows."""
ROWS_OF_TILES = 128
"""Rows of a block in kernels that also split the columns, which gives enough programs."""
GROUPS = 4
"""Groups of heads per program."""
FORWARD_ROWS = 8
"""Rows of a block without sums, where short blocks have no cost."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU of this process, also for tables that the host prepares.

    Without a GPU, and on the meta device, it is that of an H100.
    """
    if device.type == "meta" or os.environ.get("DIT_DEVICE") == "cpu" or not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(device if device.type == "cuda" else None).multi_processor_count


def rows_of_blocks(tokens: int, segments: int, blocks: int) -> int:
    """Return a number of rows with which segments of any lengths have at most `blocks` blocks with sums.

    `MOST_ROWS` and `FEWEST_ROWS` limit the result. More blocks would write and read more sums.
    """
    return min(max(cdiv(tokens, max(blocks - segments, 1)), FEWEST_ROWS), MOST_ROWS)


def rows_of_pictures(positions: int) -> int:
    """Return the positions of a block of a picture; independent of the other pictures, so that its sums are too."""
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
    """Return the blocks of a layout's local tokens, computed once per layout."""
    return layout.table(_blocks, rows)


def blocks_of_passes(layout: SequenceLayout, size: Optional[int]) -> tuple[Blocks, Blocks]:
    """Return blocks without sums for the forward pass, and blocks with sums for the backward pass.

    With a norm, each multiprocessor has two blocks of wide rows or four of narrow rows, or fewer that are not short.

    Args:
        size: width of a row; None without a norm, whose kernel splits the columns, too.
    """
    return layout.table(_blocks_of_passes, 0 if size is None else 4 if size < WIDE else 2)


def _blocks_of_passes(layout: SequenceLayout, programs: int) -> tuple[Blocks, Blocks]:
    most = programs * multiprocessors(layout.device)
    rows = rows_of_blocks(layout.num_local_tokens, layout.num_samples, most)
    return blocks_of(layout, FORWARD_ROWS), blocks_of(layout, rows)


def _blocks(layout: SequenceLayout, rows: int) -> Blocks:
    table = [
        (first, min(rows, start + length - first), segment)
        for segment, start, length in sorted(layout.segment_runs)
        for first in range(start, start + length, rows)
    ]
    counts = [0] * layout.num_samples
    for _, _, segment in table:
        counts[segment] += 1
    if layout.is_fixed:  # empty blocks, up to the largest number that packs of this size can have
        table += [(0, 0, 0)] * (cdiv(layout.num_local_tokens, rows) + layout.num_samples - len(table))
    offsets = tuple(accumulate(counts, initial=0))
    return Blocks(
        layout.tensor(table, torch.int32).view(-1, 3),
        layout.tensor(offsets, torch.int32),
    )
