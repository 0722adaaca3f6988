"""Segments of a pack by length, so that a dense kernel attends to many of them in one call.

Equally long segments form one dense batch. Short ones of nearly the same length do, too, with slots that hold no token
(`.`) and a mask that hides them from the queries: on CPU a call costs more than a few idle slots. Samples a, b, c of 3,
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
"""Segments of at most so many tokens are padded to the next power of two, at least to the first of these."""


@dataclass(frozen=True, eq=False)
class Slots:
    """Where the tokens of a pack lie in the rows of all groups.

    Attributes:
        token_P: of each slot, int64.
        idle: slots that hold no token; None if all do.
        slot_T: of each token, int64; any for those that attend to nothing.
        absent: these tokens; None if there are none.
    """

    token_P: Tensor
    idle: Optional[Tensor]
    slot_T: Tensor
    absent: Optional[Tensor]

    def fill(self, x_TNH: Tensor) -> Tensor:
        """Copy the tokens into their slots: `[T, N, H]` becomes `[P, N, H]`."""
        filled: Tensor = _Fill.apply(x_TNH, self)
        return filled

    def empty(self, x_PNH: Tensor) -> Tensor:
        """Copy the tokens back into their order in the pack, zeros where none attends."""
        emptied: Tensor = _Empty.apply(x_PNH, self)
        return emptied


def moved(x: Tensor, rows: Tensor, zeros: Optional[Tensor]) -> Tensor:
    """Select rows, and write zeros into some; rows that follow each other in memory are copied ten times as fast."""
    selected = x.contiguous().index_select(0, rows)
    return selected if zeros is None else selected.index_fill_(0, zeros, 0.0)


class _Fill(torch.autograd.Function):
    """The gradient of an idle slot is zero: no query sees it as a key, and its output is not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return moved(x, slots.token_P, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return moved(grads[0], ctx.slots.slot_T, ctx.slots.absent), None


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return moved(x, slots.slot_T, slots.absent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return moved(grads[0], ctx.slots.token_P, ctx.slots.idle), None


@dataclass(frozen=True, eq=False)
class Group:
    """Segments that one call attends to.

    Attributes:
        count: of segments.
        queries, keys: slots of each.
        mask: 0 where a slot holds a key and -inf where it is idle, `[count, 1, 1, keys]`; None if all do.
        masks: see `mask_of`.
    """

    count: int
    queries: int
    keys: int
    mask: Optional[Tensor]
    masks: dict[int, Tensor] = field(default_factory=dict)

    def mask_of(self, heads: int) -> Optional[Tensor]:
        """Return the mask for segments times heads, `[count * heads, 1, keys]`, made once for all layers."""
        if self.mask is not None and heads not in self.masks:
            self.masks[heads] = self.mask.expand(-1, heads, -1, -1).flatten(0, 1)
        return self.masks.get(heads)


@dataclass(frozen=True, eq=False)
class Grouped:
    """All segments of a pack that have queries and keys.

    Attributes:
        groups: in the order of their slots.
        queries, keys: the slots of both.
        tables: what a kernel has made of them, once for all layers.
    """

    groups: tuple[Group, ...]
    queries: Slots
    keys: Slots
    tables: dict[int, Any] = field(default_factory=dict)

    @property
    def sizes_q(self) -> list[int]:
        """Slots of a segment's queries, group by group."""
        return [group.queries for group in self.groups]

    @property
    def sizes_k(self) -> list[int]:
        """Slots of a segment's keys, group by group."""
        return [group.keys for group in self.groups]


def grouped(
    layout_q: SequenceLayout, layout_k: SequenceLayout, *, pads: bool, dtype: torch.dtype = torch.float32
) -> Grouped:
    """Return the groups of a pack, made once for all layers.

    Args:
        layout_q, layout_k: of queries and keys; at least one segment has both.
        pads: short segments of nearly the same length share a group.
        dtype: of the masks.
    """
    key = (
        "grouped",
        LONGEST_PADDED if pads else 0,
        dtype,
        layout_k.lengths,
        layout_k.padded_lengths,
        layout_k.total_tokens,
    )
    known = layout_q.tables.get(key)
    if known is None:
        known = layout_q.tables[key] = _grouped(layout_q, layout_k, pads, dtype)
    assert isinstance(known, Grouped)
    return known


def _grouped(layout_q: SequenceLayout, layout_k: SequenceLayout, pads: bool, dtype: torch.dtype) -> Grouped:
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (n_q, n_k) in enumerate(zip(layout_q.lengths, layout_k.lengths)):
        if n_q and n_k:
            members[(_padded(n_q), _padded(n_k)) if pads else (n_q, n_k)].append(i)
    groups = []
    for (n_q, n_k), own in members.items():
        if len({(layout_q.lengths[i], layout_k.lengths[i]) for i in own}) == 1:  # then nothing is idle
            n_q, n_k = layout_q.lengths[own[0]], layout_k.lengths[own[0]]
        groups.append((n_q, n_k, own))
    queries = _slots(layout_q, [(n_q, own) for n_q, _, own in groups])
    same = layout_k is layout_q
    keys = queries if same else _slots(layout_k, [(n_k, own) for _, n_k, own in groups])
    found = tuple(Group(len(own), n_q, n_k, _mask(layout_k, own, n_k, dtype)) for n_q, n_k, own in groups)
    return Grouped(found, queries, keys)


def _padded(length: int) -> int:
    return length if length > LONGEST_PADDED else max(SHORTEST, 1 << (length - 1).bit_length())


def _slots(layout: SequenceLayout, groups: list[tuple[int, list[int]]]) -> Slots:
    """Return the slots of groups, each of so many slots for each of its segments."""
    tokens, taken = [], []
    for size, own in groups:
        starts, lengths = (np.array([x[i] for i in own])[:, None] for x in (layout.starts, layout.lengths))
        index = np.arange(size)
        tokens.append((starts + np.where(index < lengths, index, 0)).ravel())
        taken.append((index < lengths).ravel())
    token_P, taken_P = np.concatenate(tokens), np.concatenate(taken)
    slot_T, present_T = np.zeros(layout.total_tokens, dtype=np.int64), np.zeros(layout.total_tokens, dtype=np.bool_)
    slot_T[token_P[taken_P]] = np.flatnonzero(taken_P)
    present_T[token_P] = True
    idle, absent = (
        None if mask.all() else torch.from_numpy(np.flatnonzero(~mask)).to(layout.device)
        for mask in (taken_P, present_T)
    )
    return Slots(torch.from_numpy(token_P).to(layout.device), idle, torch.from_numpy(slot_T).to(layout.device), absent)


def _mask(layout: SequenceLayout, own: list[int], size: int, dtype: torch.dtype) -> Optional[Tensor]:
    lengths = [layout.lengths[i] for i in own]
    if min(lengths) == size:
        return None
    idle = torch.arange(size) >= torch.tensor(lengths)[:, None]
    return torch.zeros(idle.shape, dtype=dtype).masked_fill_(idle, -torch.inf)[:, None, None].to(layout.device)


def segment_groups(layout_q: SequenceLayout, layout_k: SequenceLayout) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (query indices, key indices, number of segments) for each pair of lengths that occurs; indices int64.

    A segment without queries or without keys is left out: under context parallelism a rank may have no token of a
    sample.
    """
    if not any(map(min, layout_q.lengths, layout_k.lengths)):
        return
    of = grouped(layout_q, layout_k, pads=False)
    sizes_q, sizes_k = ([g.count * n for g, n in zip(of.groups, sizes)] for sizes in (of.sizes_q, of.sizes_k))
    rows = zip(of.queries.token_P.split(sizes_q), of.keys.token_P.split(sizes_k))
    for group, (rows_q, rows_k) in zip(of.groups, rows):
        yield rows_q, rows_k, group.count
