"""Groups of segments of similar length, so that a dense kernel attends to many segments in one call.

Segments of equal length form one dense batch. Optionally, so do short segments of nearly equal length, with idle slots
(`.`) that a mask hides from the queries, because on CPU a call costs more than a few idle slots. Samples a, b, c of 3,
12 and 5 tokens in a pack, two in rows of 8 slots and one in a row of 16:

    pack    a0 a1 a2 b0 b1 b2 ... b11 c0 ... c4
    slots   a0 a1 a2 .  .  .  .  .       . idle slots repeat the first token of their segment
            c0 c1 c2 c3 c4 .  .  .
            b0 b1 b2 b3 b4 b5 b6 b7 ... b11 .  .  .  .
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from dit.layout import SequenceLayout

SHORTEST, LONGEST_PADDED = 8, 64
"""Segments of up to `LONGEST_PADDED` tokens are padded to a power of two, at least `SHORTEST`."""


@dataclass(frozen=True, eq=False)
class Slots:
    """Mapping between the tokens of a pack and the slots of all groups.

    Attributes:
        token_P: token of each slot, int64.
        idle: slots without a token, or None.
        slot_T: slot of each token, int64; arbitrary for tokens in no group.
        absent: tokens in no group, or None.
    """

    token_P: Tensor
    idle: Optional[Tensor]
    slot_T: Tensor
    absent: Optional[Tensor]

    def gather(self, x_TNH: Tensor) -> Tensor:
        """Copy the tokens into their slots: `[T, N, H]` becomes `[P, N, H]`."""
        x_PNH: Tensor = _Gather.apply(x_TNH, self)
        return x_PNH

    def scatter(self, x_PNH: Tensor) -> Tensor:
        """Copy the slots back to the order of the pack, with zeros for tokens in no group."""
        x_TNH: Tensor = _Scatter.apply(x_PNH, self)
        return x_TNH


def select_rows(x: Tensor, rows: Tensor, zeros: Optional[Tensor]) -> Tensor:
    """Select rows, and set some of the selected rows to zero; contiguous input is copied ten times as fast."""
    selected = x.contiguous().index_select(0, rows)
    return selected if zeros is None else selected.index_fill_(0, zeros, 0.0)


class _Gather(torch.autograd.Function):
    """The gradient of an idle slot is zero, because the mask hides its key and its output is unused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return select_rows(x, slots.token_P, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return select_rows(grads[0], ctx.slots.slot_T, ctx.slots.absent), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return select_rows(x, slots.slot_T, slots.absent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return select_rows(grads[0], ctx.slots.token_P, ctx.slots.idle), None


@dataclass(frozen=True, eq=False)
class Group:
    """Segments that share one attention call.

    Attributes:
        count: number of segments.
        queries, keys: query and key slots per segment.
        mask: 0 for slots with a key and -inf for idle slots, `[count, 1, 1, keys]`; None if no slot is idle.
        masks: cache of `mask_of`.
    """

    count: int
    queries: int
    keys: int
    mask: Optional[Tensor]
    masks: dict[int, Tensor] = field(default_factory=dict)

    def mask_of(self, heads: int) -> Optional[Tensor]:
        """Return the mask expanded over heads, `[count * heads, 1, keys]`, computed once for all layers."""
        if self.mask is not None and heads not in self.masks:
            self.masks[heads] = self.mask.expand(-1, heads, -1, -1).flatten(0, 1)
        return self.masks.get(heads)


@dataclass(frozen=True, eq=False)
class Grouped:
    """All segments of a pack that have queries and keys.

    Attributes:
        groups: groups in the order of their slots.
        queries, keys: slots of queries and of keys.
        tables: cache of values that kernels compute from the groups, shared by all layers.
    """

    groups: tuple[Group, ...]
    queries: Slots
    keys: Slots
    tables: dict[int, Any] = field(default_factory=dict)

    @property
    def sizes_q(self) -> list[int]:
        """Query slots per segment, for each group."""
        return [group.queries for group in self.groups]

    @property
    def sizes_k(self) -> list[int]:
        """Key slots per segment, for each group."""
        return [group.keys for group in self.groups]


def grouped(
    layout_q: SequenceLayout, layout_k: SequenceLayout, *, pads: bool, dtype: torch.dtype = torch.float32
) -> Grouped:
    """Return the groups of a pack, computed once for all layers.

    Args:
        layout_q, layout_k: layouts of queries and keys; at least one segment has both.
        pads: whether short segments of nearly equal length share a group.
        dtype: dtype of the masks.
    """
    key = (
        "grouped",
        LONGEST_PADDED if pads else 0,
        dtype,
        layout_k.lengths,
        layout_k.padded_lengths,
        layout_k.total_tokens,
    )
    groups = layout_q.tables.get(key)
    if groups is None:
        groups = layout_q.tables[key] = _grouped(layout_q, layout_k, pads, dtype)
    assert isinstance(groups, Grouped)
    return groups


def _grouped(layout_q: SequenceLayout, layout_k: SequenceLayout, pads: bool, dtype: torch.dtype) -> Grouped:
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (n_q, n_k) in enumerate(zip(layout_q.lengths, layout_k.lengths)):
        if n_q and n_k:
            members[(_padded(n_q), _padded(n_k)) if pads else (n_q, n_k)].append(i)
    sizes = []
    for (n_q, n_k), segments in members.items():
        if len({(layout_q.lengths[i], layout_k.lengths[i]) for i in segments}) == 1:  # no padding needed
            n_q, n_k = layout_q.lengths[segments[0]], layout_k.lengths[segments[0]]
        sizes.append((n_q, n_k, segments))
    queries = _slots(layout_q, [(n_q, segments) for n_q, _, segments in sizes])
    same = layout_k is layout_q
    keys = queries if same else _slots(layout_k, [(n_k, segments) for _, n_k, segments in sizes])
    groups = tuple(Group(len(ids), n_q, n_k, _mask(layout_k, ids, n_k, dtype)) for n_q, n_k, ids in sizes)
    return Grouped(groups, queries, keys)


def _padded(length: int) -> int:
    return length if length > LONGEST_PADDED else max(SHORTEST, 1 << (length - 1).bit_length())


def _slots(layout: SequenceLayout, groups: list[tuple[int, list[int]]]) -> Slots:
    """Return the slots of groups, given the slots per segment and the segments of each group."""
    tokens, occupied = [], []
    for size, segments in groups:
        starts, lengths = (np.array([x[i] for i in segments])[:, None] for x in (layout.starts, layout.lengths))
        index = np.arange(size)
        tokens.append((starts + np.where(index < lengths, index, 0)).ravel())
        occupied.append((index < lengths).ravel())
    token_P, occupied_P = np.concatenate(tokens), np.concatenate(occupied)
    slot_T, present_T = np.zeros(layout.total_tokens, dtype=np.int64), np.zeros(layout.total_tokens, dtype=np.bool_)
    slot_T[token_P[occupied_P]] = np.flatnonzero(occupied_P)
    present_T[token_P] = True
    idle, absent = (
        None if mask.all() else torch.from_numpy(np.flatnonzero(~mask)).to(layout.device)
        for mask in (occupied_P, present_T)
    )
    return Slots(torch.from_numpy(token_P).to(layout.device), idle, torch.from_numpy(slot_T).to(layout.device), absent)


def _mask(layout: SequenceLayout, segments: list[int], size: int, dtype: torch.dtype) -> Optional[Tensor]:
    lengths = [layout.lengths[i] for i in segments]
    if min(lengths) == size:
        return None
    idle = torch.arange(size) >= torch.tensor(lengths)[:, None]
    return torch.zeros(idle.shape, dtype=dtype).masked_fill_(idle, -torch.inf)[:, None, None].to(layout.device)


def segment_groups(layout_q: SequenceLayout, layout_k: SequenceLayout) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (query indices, key indices, number of segments) for each pair of lengths; indices are int64.

    Segments without queries or without keys are skipped; under context parallelism a rank may have no token of a
    sample.
    """
    if not any(map(min, layout_q.lengths, layout_k.lengths)):
        return
    groups = grouped(layout_q, layout_k, pads=False)
    counts = [group.count for group in groups.groups]
    sizes_q, sizes_k = ([c * n for c, n in zip(counts, sizes)] for sizes in (groups.sizes_q, groups.sizes_k))
    rows = zip(groups.queries.token_P.split(sizes_q), groups.keys.token_P.split(sizes_k))
    for group, (rows_q, rows_k) in zip(groups.groups, rows):
        yield rows_q, rows_k, group.count
