"""Groups of segments of equal length, so that a dense kernel attends to many segments in one call.

Samples a, b, c of 3, 4 and 3 tokens (`.` is padding):

    pack    a0 a1 a2 . b0 b1 b2 b3 c0 c1 c2 .
    rows    a0 a1 a2 c0 c1 c2 | b0 b1 b2 b3         two groups, of 2 and of 1 segments

Many small groups cost more than one group with a mask, so short keys are padded to the longest segment.
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


CALL_PRODUCTS = 1 << 20
"""Multiply-adds that take about as long as the call of a kernel (0.1 ms on a CPU core)."""


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


def grouped(layout_q: SequenceLayout, layout_k: SequenceLayout) -> Groups:
    """Return the groups of a pack, computed once for all layers; at least one segment has queries and keys."""
    return layout_q.table(_grouped, layout_k)


def _grouped(layout_q: SequenceLayout, layout_k: SequenceLayout) -> Groups:
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, lengths in enumerate(zip(layout_q.lengths, layout_k.lengths)):
        if all(lengths):
            members[lengths].append(i)
    segments = list(members.values())
    queries = _rows(layout_q, segments)
    keys = queries if layout_k is layout_q else _rows(layout_k, segments)
    return Groups([len(group) for group in segments], queries, keys)


@dataclass(frozen=True, eq=False)
class PaddedKeys:
    """Keys of a pack whose segments are padded to the longest one by their own last key.

    Attributes:
        rows: rows of the keys, one group.
        mask_S11M: True for real keys, `[S, 1, 1, longest]`.
    """

    rows: Rows
    mask_S11M: Tensor


def padded_keys(layout_q: SequenceLayout, layout_k: SequenceLayout, width: int) -> Optional[PaddedKeys]:
    """Return the padded keys for a dense batch of queries, or None if groups are faster, or a segment has no keys.

    Args:
        width: size of all heads together.
    """
    longest, calls = layout_k.max_seqlen, len(set(layout_k.lengths)) - 1
    padding = longest * layout_k.num_samples - layout_k.valid_tokens
    if not all(layout_k.lengths) or padding * layout_q.max_seqlen * width >= calls * CALL_PRODUCTS:
        return None
    return layout_k.table(_padded_keys)


def _padded_keys(layout: SequenceLayout) -> PaddedKeys:
    lengths_S1, starts_S1 = np.array(layout.lengths)[:, None], np.array(layout.starts)[:, None]
    index_M = np.arange(layout.max_seqlen)
    token_R = (starts_S1 + np.minimum(index_M, lengths_S1 - 1)).ravel()
    mask_SM = torch.from_numpy(index_M < lengths_S1)
    return PaddedKeys(_mapping(layout, token_R, [len(token_R)]), to_device(mask_SM, layout.device)[:, None, None])


def _rows(layout: SequenceLayout, groups: list[list[int]]) -> Rows:
    spans = [np.arange(layout.lengths[i]) + layout.starts[i] for group in groups for i in group]
    return _mapping(layout, np.concatenate(spans), [sum(layout.lengths[i] for i in group) for group in groups])


def _mapping(layout: SequenceLayout, token_R: np.ndarray, sizes: list[int]) -> Rows:
    row_T = np.zeros(layout.total_tokens, dtype=np.int64)
    tokens, rows = np.unique(token_R, return_index=True)  # the first row of a token that is repeated
    row_T[tokens] = rows
    absent = np.setdiff1d(np.arange(layout.total_tokens), tokens)
    tables = [to_device(torch.from_numpy(x), layout.device) for x in (token_R, row_T, absent)]
    return Rows(tables[0], tables[1], tables[2] if len(absent) else None, sizes)


def segment_groups(layout_q: SequenceLayout, layout_k: SequenceLayout) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (query indices, key indices, number of segments) for each pair of lengths; indices are int64.

    Segments without queries or without keys are skipped; under context parallelism a rank may have no token of a
    sample.
    """
    if not any(map(min, layout_q.lengths, layout_k.lengths)):
        return
    groups = grouped(layout_q, layout_k)
    rows = groups.queries.token_R.split(groups.queries.sizes), groups.keys.token_R.split(groups.keys.sizes)
    yield from zip(*rows, groups.counts)
