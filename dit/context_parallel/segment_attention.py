"""Attention inside segments finer than samples (frames, columns), with or without context parallelism.

| | before the projections | in attention |
|---|---|---|
| one context rank | - | tokens are permuted to segment order |
| `hybrid` | one all-to-all dispatches complete segments to their owners, one combines the results | as on one rank |
| `context` | - | segments are split; keys and values are exchanged as in full attention (see `attention`) |

`hybrid`, two ranks, a clip of 2 frames (a, b) with 2 patches, temporal attention (columns a0 b0 and a1 b1):

    rank 0: a0 a1 --dispatch--> a0 b0 --projections, attention--> a0 b0 --combine--> a0 a1
    rank 1: b0 b1 --dispatch--> a1 b1 --projections, attention--> a1 b1 --combine--> b0 b1

Elements sent per rank and forward pass, with T tokens, c ranks, width D: 2 (T/c) D (c-1)/c for hybrid, c times that for
the ring. A segment whose tokens are all local to one rank is not sent, so spatial attention sends nothing under the
contiguous split if the number of frames of every sample is a multiple of c. Under sequence parallelism each
tensor-parallel rank exchanges its own tokens in its own context-parallel group; without it, each exchanges all tokens.

Shape suffixes: T tokens, N heads, H head size, D hidden size; V real tokens of the pack, ordered by segment;
K segments; R context-parallel ranks.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Optional

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dit.batch import PackedBatch
from dit.context_parallel.attention import ContextAttention
from dit.context_parallel.exchange import ExchangePlan, exchange
from dit.context_parallel.partition import ContextSplit, TokenPartition, context_partition
from dit.context_parallel.segments import AttentionKind, Grids, Segments, assign_owners, segments_of
from dit.kernels.attention import Attention, segment_sdpa, zeros_of
from dit.layout import SequenceLayout, to_device


@dataclass(frozen=True)
class SegmentAttentionPlan:
    """Plan of one kind of self-attention: the exchange of tokens, and the attention between the projections.

    Attributes:
        attend: attention between the projections; None for the attention over samples.
        exchange: exchange that sends tokens to the rank that attends to them, before the projections, or None.
        positions_T3: (t, h, w) patch index of the tokens after the exchange; None without an exchange.
    """

    attend: Optional[Attention] = None
    exchange: Optional[ExchangePlan] = None
    group: Optional[ProcessGroup] = None
    positions_T3: Optional[Tensor] = None

    def dispatch(self, x_TD: Tensor) -> Tensor:
        """Send tokens to the ranks that attend to them."""
        return exchange(x_TD, self.exchange, self.group)

    def combine(self, x_TD: Tensor) -> Tensor:
        """Send results back to the ranks of the tokens."""
        return exchange(x_TD, self.exchange and self.exchange.inverse, self.group)


def plan_segment_attention(
    kind: AttentionKind, attention: Attention, batch: PackedBatch, tp_rank: int, tp_size: int
) -> SegmentAttentionPlan:
    """Plan one kind of attention for one pack; the plans are cached, so that all layers of a step share them.

    Args:
        batch: pack of the local tokens of this context-parallel rank.
        tp_rank, tp_size: tensor-parallel rank and size under sequence parallelism; 0 and 1 without it.
    """
    if kind == "full":
        return SegmentAttentionPlan()
    if batch.layout.is_fixed:
        return SegmentAttentionPlan(_masked(kind, attention, batch))
    # The global pack determines which tokens are local, so it is the key of the cached plans.
    pack, grids = batch.layout.plain, batch.grids
    if not isinstance(attention, ContextAttention):
        return SegmentAttentionPlan(partial(_attend, attention, _one_rank_segments(pack, grids, kind)))
    group, split = attention.group, attention.split
    if attention.segment_comm == "context":
        segments = _split_segments(pack, grids, kind, group.size(), split)
        return SegmentAttentionPlan(partial(_attend_split, attention, segments, group.rank()))
    owned = _owned_segments(pack, grids, kind, group.size(), split, group.rank(), tp_rank, tp_size)
    return SegmentAttentionPlan(partial(_attend, attention.local, owned), owned.exchange, group, owned.positions_T3)


@dataclass(frozen=True, eq=False)
class _LocalSegments:
    """Complete segments that one rank attends to.

    Attributes:
        layout: layout of the segments as a pack; None if the rank has no segments.
        order: permutation of the gathered tokens to segment order; None for the identity.
        exchange, positions_T3: as in `SegmentAttentionPlan`.
    """

    layout: Optional[SequenceLayout]
    order: Optional[ExchangePlan]
    exchange: Optional[ExchangePlan] = None
    positions_T3: Optional[Tensor] = None


@dataclass(frozen=True, eq=False)
class _SplitSegments:
    """Segments that are split over ranks.

    Attributes:
        orders: for each rank, the permutation of its tokens to segment order.
        partition: local tokens of each rank in the permuted pack.
    """

    orders: tuple[ExchangePlan, ...]
    partition: TokenPartition


def _masked(kind: AttentionKind, attention: Attention, batch: PackedBatch) -> Attention:
    """Return attention between all tokens of a pack of fixed size with a mask, whose shape depends on no segments.

    Under context parallelism, `attention` exchanges tokens for heads.
    """
    layout, context = batch.layout, attention if isinstance(attention, ContextAttention) else None
    if context is not None:
        assert context.comm == "a2a", "other exchanges would ignore the mask"
        [layout] = context.partition(layout).blocks(context.group.size())
    # Empty samples, to which padding may belong, have no positions in a frame.
    area_T = batch.grid_sizes()[layout.segment_ids_T, 1:].prod(1).clamp(min=1)
    index_T = layout.token_index_T
    part_T = index_T // area_T if kind == "spatial" else index_T % area_T
    keys_T2 = torch.stack([layout.segment_ids_T, part_T], 1)
    local = partial(segment_sdpa, same_TK=(keys_T2[:, None] == keys_T2).all(-1))
    return local if context is None else replace(context, local=local)


def _attend(
    attention: Attention, segments: _LocalSegments, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, *_: SequenceLayout
) -> Tensor:
    if segments.layout is None:
        return zeros_of(q_TNH, k_TNH, v_TNH)
    q, k, v = (exchange(x, segments.order) for x in (q_TNH, k_TNH, v_TNH))
    out_TNH = attention(q, k, v, segments.layout, segments.layout)
    return exchange(out_TNH, segments.order and segments.order.inverse)


def _attend_split(
    attention: ContextAttention,
    segments: _SplitSegments,
    rank: int,
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    *_: SequenceLayout,
) -> Tensor:
    order = segments.orders[rank]
    q, k, v = (exchange(x, order) for x in (q_TNH, k_TNH, v_TNH))
    return exchange(attention.exchange(q, k, v, segments.partition), order.inverse)


def _order(indices: Tensor, tokens_in: int, device: torch.device) -> Optional[ExchangePlan]:
    """Return the plan that selects `indices` of `tokens_in` tokens, in this order; None for the identity."""
    if torch.equal(indices, torch.arange(tokens_in)):
        return None
    return ExchangePlan(to_device(indices, device), None, tokens_in, len(indices))


@lru_cache(maxsize=32)
def _one_rank_segments(pack: SequenceLayout, grids: Grids, kind: AttentionKind) -> _LocalSegments:
    """Plan the segments of a pack without context parallelism."""
    segments = segments_of(pack, grids, kind)
    layout = SequenceLayout.from_lengths(segments.lengths_K.tolist(), device=pack.device)
    return _LocalSegments(layout, _order(segments.indices_V, pack.total_tokens, pack.device))


@lru_cache(maxsize=32)
def _split_segments(
    pack: SequenceLayout, grids: Grids, kind: AttentionKind, size: int, split: ContextSplit
) -> _SplitSegments:
    """Plan segments that stay split over ranks, with local tokens in segment order and padding at the end."""
    segments, indices_RT = segments_of(pack, grids, kind), context_partition(pack, size, split).indices_RT
    index_T = torch.full((pack.total_tokens,), -1)  # index of each token in the permuted pack
    index_T[segments.indices_V] = torch.arange(len(segments.indices_V))
    index_T[index_T < 0] = torch.arange(len(segments.indices_V), pack.total_tokens)
    sorted_RT, order_RT = index_T[indices_RT].sort(1)
    orders = tuple(ExchangePlan(to_device(order, pack.device), None, len(order), len(order)) for order in order_RT)
    return _SplitSegments(orders, TokenPartition(sorted_RT, _local_counts(segments, indices_RT), None, pack.device))


def _locate(segments: Segments, indices_RT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of each real token, and its local index on that rank."""
    flat = indices_RT.flatten()
    at_T = torch.empty_like(flat).scatter_(0, flat, torch.arange(len(flat)))
    at_V = at_T[segments.indices_V]
    return at_V // indices_RT.shape[1], at_V % indices_RT.shape[1]


def _local_counts(segments: Segments, indices_RT: Tensor) -> Tensor:
    """Count the tokens of each segment on each rank, `[K, R]`."""
    size = len(indices_RT)
    pair_V = segments.segment_V * size + _locate(segments, indices_RT)[0]
    return pair_V.bincount(minlength=len(segments.lengths_K) * size).view(-1, size)


@lru_cache(maxsize=32)
def _owned_segments(
    pack: SequenceLayout,
    grids: Grids,
    kind: AttentionKind,
    size: int,
    split: ContextSplit,
    rank: int,
    tp_rank: int,
    tp_size: int,
) -> _LocalSegments:
    """Plan the exchange that completes segments on their owners, for one rank.

    Every rank plans from the same pack and therefore computes the same owners. Tokens are sent from tensor-parallel
    rank i of one context-parallel rank to rank i of another. The tensor-parallel ranks of an owner may receive
    different numbers of tokens, which are padded with zeros. The projection gathers them, then `order` sorts them:

        tensor rank 0 received: s t .      tensor rank 1 received: u v w      (`.` is padding)
        gathered:               s t . u v w    --order-->    s u t v w        (segment order)
    """
    segments, indices_RT = segments_of(pack, grids, kind), context_partition(pack, size, split).indices_RT
    rank_V, index_V = _locate(segments, indices_RT)
    owner_K = assign_owners(segments.lengths_K, _local_counts(segments, indices_RT))
    owner_V, lengths = owner_K[segments.segment_V], segments.lengths_K[owner_K == rank].tolist()
    layout = SequenceLayout.from_lengths(lengths, device=pack.device) if lengths else None
    owned = owner_V == rank
    if torch.equal(owner_V, rank_V):
        return _LocalSegments(layout, _order(index_V[owned], indices_RT.shape[1], pack.device))

    tokens_in = indices_RT.shape[1] // tp_size
    part_V = index_V // tokens_in
    sent = ((rank_V == rank) & (part_V == tp_rank)).nonzero()[:, 0]
    sent = sent[owner_V[sent].argsort(stable=True)]
    # A rank without segments gets one token of zeros, because some libraries do not support empty matrices.
    tokens_out = max(1, int(part_V[owned].bincount(minlength=tp_size).max()))
    received_V = owned & (part_V == tp_rank)
    receive_index = rank_V[received_V].argsort(stable=True)
    plan = ExchangePlan(
        to_device(index_V[sent] % tokens_in, pack.device),
        to_device(receive_index, pack.device),
        tokens_in,
        tokens_out,
        tuple(owner_V[sent].bincount(minlength=size).tolist()),
        tuple(rank_V[received_V].bincount(minlength=size).tolist()),
    )
    # Indices of this owner's tokens after its tensor-parallel ranks have gathered them.
    gathered = torch.empty(int(owned.sum()), dtype=torch.int64)
    for part in range(tp_size):
        in_part = part_V[owned] == part
        gathered[in_part] = part * tokens_out + torch.arange(int(in_part.sum()))
    positions_T3 = torch.zeros(tp_size * tokens_out, 3, dtype=torch.int64)
    positions_T3[gathered] = segments.positions_V3[owned]
    order = _order(gathered, tp_size * tokens_out, pack.device)
    return _LocalSegments(layout, order, plan, to_device(positions_T3, pack.device))
