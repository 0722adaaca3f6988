"""Groups of segments of equal length, so that a dense kernel attends to many segments in one call.

Samples a, b, c of 3, 4 and 3 tokens (`.` is padding):

    pack    a0 a1 a2 . b0 b1 b2 b3 c0 c1 c2 .
    rows    a0 a1 a2 c0 c1 c2 | b0 b1 b2 b3         two groups, of 2 and of 1 segments
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from dit.layout import SequenceLayout, to_device


@dataclass(frozen=True, eq=False)
class Rows:
    """Mapping between the tokens of a pack and the rows of all groups.

    Attributes:
        token_R: token of each row, int64.
        row_T: row of each token, int64; arbitrary for tokens in no group.
        absent: tokens in no group, or None.
        sizes: number of rows of each group.
    """

    token_R: Tensor
    row_T: Tensor
    absent: Optional[Tensor]
    sizes: list[int]

    def gather(self, x_TNH: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of each group, `[rows, N, H]`."""
        x_RNH: Tensor = _Move.apply(x_TNH, self, False)
        return x_RNH.split(self.sizes)

    def scatter(self, groups: list[Tensor]) -> Tensor:
        """Return the rows of all groups in the order of the pack, with zeros for tokens in no group."""
        x_TNH: Tensor = _Move.apply(torch.cat(groups), self, True)
        return x_TNH

    def move(self, x: Tensor, to_tokens: bool) -> Tensor:
        """Select the token of each row, or the row of each token."""
        if not to_tokens:
            return x.index_select(0, self.token_R)
        moved = x.index_select(0, self.row_T)
        return moved if self.absent is None else moved.index_fill_(0, self.absent, 0.0)


class _Move(torch.autograd.Function):
    """The gradient of a permutation is its inverse, which is faster than the sum that `index_select` computes."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, rows: Rows, to_tokens: bool) -> Tensor:
        ctx.rows, ctx.to_tokens = rows, to_tokens  # type: ignore[attr-defined]
        return rows.move(x, to_tokens)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rows.move(grads[0], not ctx.to_tokens), None, None  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Groups:
    """All segments of a pack that have queries and keys.

    Attributes:
        counts: number of segments of each group.
        queries, keys: rows of queries and of keys.
    """

    counts: list[int]
    queries: Rows
    keys: Rows


def groups_of(layout_q: SequenceLayout, layout_k: SequenceLayout) -> Groups:
    """Return the groups of a pack, for `SequenceLayout.table`; at least one segment has queries and keys."""
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, lengths in enumerate(zip(layout_q.lengths, layout_k.lengths)):
        if all(lengths):
            members[lengths].append(i)
    segments = list(members.values())
    queries = _rows(layout_q, segments)
    keys = queries if layout_k is layout_q else _rows(layout_k, segments)
    return Groups([len(group) for group in segments], queries, keys)


def _rows(layout: SequenceLayout, groups: list[list[int]]) -> Rows:
    token_R = np.concatenate([np.arange(layout.lengths[i]) + layout.starts[i] for group in groups for i in group])
    row_T = np.zeros(layout.total_tokens, dtype=np.int64)
    row_T[token_R] = np.arange(len(token_R))
    absent = np.setdiff1d(np.arange(layout.total_tokens), token_R)
    tables = [to_device(torch.from_numpy(x), layout.device) for x in (token_R, row_T, absent)]
    sizes = [sum(layout.lengths[i] for i in group) for group in groups]
    return Rows(tables[0], tables[1], tables[2] if len(absent) else None, sizes)


def segment_groups(layout_q: SequenceLayout, layout_k: SequenceLayout) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (query indices, key indices, number of segments) for each pair of lengths; indices are int64.

    Segments without queries or without keys are skipped; under context parallelism a rank may have no token of a
    sample.
    """
    if not any(map(min, layout_q.lengths, layout_k.lengths)):
        return
    groups = layout_q.table(groups_of, layout_k)
    rows = groups.queries.token_R.split(groups.queries.sizes), groups.keys.token_R.split(groups.keys.sizes)
    yield from zip(*rows, groups.counts)
