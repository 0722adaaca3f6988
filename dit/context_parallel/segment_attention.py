"""Attention inside segments finer than samples, also where tokens are spread over context-parallel ranks.

Three ways, chosen by where the tokens are:

| | before the projections | in attention |
|---|---|---|
| one context rank | nothing | rows are put segment after segment |
| `hybrid` | one all-to-all brings whole segments to their owners, one brings the results back | as on one rank |
| `context` | nothing | segments are cut; keys and values travel as in full attention (ring, all-gather, Ulysses) |

Elements sent per rank and forward pass, with T tokens, c ranks, width D: hybrid 2 (T/c) D (c-1)/c, the ring c times as
many. A frame or column that one rank holds whole stays: spatial attention sends nothing where the frames of every
sample are a multiple of the ranks under the contiguous split. Under sequence parallelism each tensor-parallel rank
moves its own share of the rows, among its own context-parallel ranks; without it each of them moves all of them.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Optional

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dit.context_parallel.attention import ContextAttention
from dit.context_parallel.exchange import Route, move
from dit.context_parallel.partition import ContextSplit, Shares, context_rows
from dit.context_parallel.segments import AttentionKind, Grids, Segments, assign_owners, segments_of
from dit.kernels.attention import Attention, zeros_of
from dit.layout import SequenceLayout


@dataclass(frozen=True)
class Place:
    """Where one kind of self-attention happens, and how tokens get there and back.

    Attributes:
        attend: what to call between the projections; None for the attention of whole samples.
        route: the tokens' way to the rank that attends to them, before the projections; None where they stay.
        group: of that way.
        positions_T3: (t, h, w) patch index of the rows that attention gets; None for those of the rows held before.
    """

    attend: Optional[Attention] = None
    route: Optional[Route] = None
    group: Optional[ProcessGroup] = None
    positions_T3: Optional[Tensor] = None

    def enter(self, x_TD: Tensor) -> Tensor:
        """Bring tokens to where they are attended to."""
        return move(x_TD, self.route, self.group)

    def leave(self, x_TD: Tensor) -> Tensor:
        """Bring results to where the tokens came from."""
        return move(x_TD, self.route and self.route.back, self.group)


def place_of(
    kind: AttentionKind, attention: Attention, layout: SequenceLayout, grids: Grids, tp_rank: int, tp_size: int
) -> Place:
    """Return the place of one kind of attention for one pack; what can be kept is made once for all layers.

    Args:
        attention: the attention path of this process.
        layout: the rows of this context-parallel rank.
        grids: (t, h, w) of every sample of the whole pack.
        tp_rank, tp_size: this tensor-parallel rank and how many share the rows (sequence parallel); 0 and 1 for none.

    Raises:
        BatchError: a grid does not have the tokens of its sample.
    """
    if kind == "full":
        return Place()
    # The rows that a rank holds follow from the pack, so plans are kept by the pack.
    pack = replace(layout, rows=None, parent=None)
    if not isinstance(attention, ContextAttention):
        return Place(partial(_attend, attention, _in_order(pack, grids, kind)))
    group, split = attention.group, attention.split
    if attention.segment_comm == "context":
        cut = _cut(pack, grids, kind, group.size(), split)
        return Place(partial(_attend_cut, attention, cut, group.rank()))
    share = (group.size(), split, group.rank(), tp_rank, tp_size)
    whole = _whole(pack, grids, kind, *share)
    return Place(partial(_attend, attention.local, whole), whole.travel, group, whole.positions_T3)


@dataclass(frozen=True, eq=False)
class _WholeSegments:
    """Segments that one rank attends to.

    Attributes:
        layout: the segments side by side; None for no segment.
        order: from the rows that attention gets to that order.
        travel, positions_T3: as in `Place`.
    """

    layout: Optional[SequenceLayout]
    order: Optional[Route]
    travel: Optional[Route] = None
    positions_T3: Optional[Tensor] = None


@dataclass(frozen=True, eq=False)
class _CutSegments:
    """Segments that are spread over ranks: on each rank, the order by segment of its rows, and what all ranks hold."""

    orders: tuple[Route, ...]
    shares: Shares


def _attend(
    attention: Attention, segments: _WholeSegments, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, *_: SequenceLayout
) -> Tensor:
    if segments.layout is None:
        return zeros_of(q_TNH, k_TNH, v_TNH)
    q, k, v = (move(x, segments.order) for x in (q_TNH, k_TNH, v_TNH))
    out_TNH = attention(q, k, v, segments.layout, segments.layout)
    return move(out_TNH, segments.order and segments.order.back)


def _attend_cut(
    attention: ContextAttention,
    cut: _CutSegments,
    rank: int,
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    *_: SequenceLayout,
) -> Tensor:
    order = cut.orders[rank]
    q, k, v = (move(x, order) for x in (q_TNH, k_TNH, v_TNH))
    return move(attention.exchange(q, k, v, cut.shares), order.back)


def _order(rows: Tensor, rows_in: int, device: torch.device) -> Optional[Route]:
    """Return the way of `rows` out of `rows_in` to the front, in their order; None if all are there already."""
    if torch.equal(rows, torch.arange(rows_in)):
        return None
    return Route(rows.to(device), None, rows_in, len(rows))


@lru_cache(maxsize=32)
def _in_order(pack: SequenceLayout, grids: Grids, kind: AttentionKind) -> _WholeSegments:
    """Return the segments of a pack that one rank holds whole."""
    segments = segments_of(pack, grids, kind)
    layout = SequenceLayout.from_lengths(segments.lengths_K.tolist(), device=pack.device)
    return _WholeSegments(layout, _order(segments.rows_V, pack.total_tokens, pack.device))


@lru_cache(maxsize=32)
def _cut(pack: SequenceLayout, grids: Grids, kind: AttentionKind, size: int, split: ContextSplit) -> _CutSegments:
    """Return how ranks hold the segments of a pack: rows in the order of the segments, padding behind."""
    segments, rows_RT = segments_of(pack, grids, kind), context_rows(pack, size, split).rows_RT
    place_T = torch.full((pack.total_tokens,), -1)
    place_T[segments.rows_V] = torch.arange(len(segments.rows_V))
    place_T[place_T < 0] = torch.arange(len(segments.rows_V), pack.total_tokens)
    sorted_RT, order_RT = place_T[rows_RT].sort(1)
    orders = tuple(Route(order.to(pack.device), None, len(order), len(order)) for order in order_RT)
    return _CutSegments(orders, Shares(sorted_RT, _held(segments, rows_RT), None, pack.device))


def _home(segments: Segments, rows_RT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank that holds each real row, and where it lies there."""
    flat = rows_RT.flatten()
    at_T = torch.empty_like(flat).scatter_(0, flat, torch.arange(len(flat)))
    at_V = at_T[segments.rows_V]
    return at_V // rows_RT.shape[1], at_V % rows_RT.shape[1]


def _held(segments: Segments, rows_RT: Tensor) -> Tensor:
    """Count the rows of each segment on each rank, `[K, R]`."""
    size = len(rows_RT)
    address_V = segments.segment_V * size + _home(segments, rows_RT)[0]
    return address_V.bincount(minlength=len(segments.lengths_K) * size).view(-1, size)


@lru_cache(maxsize=32)
def _whole(
    pack: SequenceLayout,
    grids: Grids,
    kind: AttentionKind,
    size: int,
    split: ContextSplit,
    rank: int,
    tp_rank: int,
    tp_size: int,
) -> _WholeSegments:
    """Plan how segments become whole, for one rank; every rank plans from the same pack and comes to the same owners.

    Rows go from tensor-parallel rank i of one context-parallel rank to rank i of another. The tensor-parallel ranks of
    an owner thus get different rows, perhaps not equally many: short ones get zeros behind. Gathered by the projection,
    the rows are put in order.
    """
    segments, rows_RT = segments_of(pack, grids, kind), context_rows(pack, size, split).rows_RT
    home_V, at_V = _home(segments, rows_RT)
    owner_K = assign_owners(segments.lengths_K, _held(segments, rows_RT))
    owner_V, lengths = owner_K[segments.segment_V], segments.lengths_K[owner_K == rank].tolist()
    layout = SequenceLayout.from_lengths(lengths, device=pack.device) if lengths else None
    owned = owner_V == rank
    if torch.equal(owner_V, home_V):
        return _WholeSegments(layout, _order(at_V[owned], rows_RT.shape[1], pack.device))

    rows_in = rows_RT.shape[1] // tp_size
    part_V = at_V // rows_in
    leaving = ((home_V == rank) & (part_V == tp_rank)).nonzero()[:, 0]
    leaving = leaving[owner_V[leaving].argsort(stable=True)]
    # A rank that owns nothing still has a row, of zeros: some libraries do not multiply empty matrices.
    rows_out = max(1, int(part_V[owned].bincount(minlength=tp_size).max()))
    arriving_V = owned & (part_V == tp_rank)
    put = home_V[arriving_V].argsort(stable=True)
    travel = Route(
        (at_V[leaving] % rows_in).to(pack.device),
        put.to(pack.device),
        rows_in,
        rows_out,
        tuple(owner_V[leaving].bincount(minlength=size).tolist()),
        tuple(home_V[arriving_V].bincount(minlength=size).tolist()),
    )
    # Where the rows that this owner's segments need lie once its tensor-parallel ranks have gathered them.
    gathered = torch.empty(int(owned.sum()), dtype=torch.int64)
    for part in range(tp_size):
        mine = part_V[owned] == part
        gathered[mine] = part * rows_out + torch.arange(int(mine.sum()))
    positions_T3 = torch.zeros(tp_size * rows_out, 3, dtype=torch.int64)
    positions_T3[gathered] = segments.positions_V3[owned]
    order = _order(gathered, tp_size * rows_out, pack.device)
    return _WholeSegments(layout, order, travel, positions_T3.to(pack.device))
