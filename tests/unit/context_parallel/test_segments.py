"""Laws of segments finer than samples: their tokens, their owners, and the plans that exchange tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dit.context_parallel.exchange import ExchangePlan
from dit.context_parallel.partition import context_partition
from dit.context_parallel.segment_attention import _one_rank_segments, _owned_segments, _split_segments
from dit.context_parallel.segments import Grids, assign_owners, segments_of
from dit.errors import BatchError
from dit.layout import SequenceLayout
from dit.patchify import grid_positions

KINDS = ("spatial", "temporal")
SPLITS = ("contiguous", "load_balanced")


def a_pack(grids: Grids, multiple: int = 1, tail: int = 0) -> SequenceLayout:
    lengths = [t * h * w for t, h, w in grids]
    layout = SequenceLayout.from_lengths(lengths, multiple_of=multiple)
    return SequenceLayout(layout.lengths, layout.padded_lengths, layout.total_tokens + tail)


@st.composite
def spread_packs(draw) -> tuple[SequenceLayout, Grids, str, int, str, int]:
    """Return a pack, its grids, a kind, context ranks, split, and sequence-parallel ranks."""
    size, tp_size = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (4, 2)]))
    grids = tuple(draw(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=1, max_size=4)))
    layout = a_pack(grids, 2 * size * tp_size, size * tp_size * draw(st.integers(0, 2)))
    return layout, grids, draw(st.sampled_from(KINDS)), size, draw(st.sampled_from(SPLITS)), tp_size


def segment_lists(layout: SequenceLayout, grids: Grids, kind: str) -> list[list[int]]:
    """Return the token indices of each segment, by loops."""
    found = []
    for start, (t, h, w) in zip(layout.starts, grids):
        at = [[start + frame * h * w + i for i in range(h * w)] for frame in range(t)]
        found += at if kind == "spatial" else [list(column) for column in zip(*at)]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_frames_and_columns(kind: str):
    grids = ((3, 2, 2), (1, 2, 3), (2, 1, 4))
    layout = a_pack(grids, multiple=8, tail=4)
    segments, expected = segments_of(layout, grids, kind), segment_lists(layout, grids, kind)
    assert segments.lengths_K.tolist() == [len(rows) for rows in expected]
    assert segments.indices_V.tolist() == [row for rows in expected for row in rows]
    positions = torch.zeros(layout.total_tokens, 3, dtype=torch.int64)
    for start, length, grid in zip(layout.starts, layout.lengths, grids):
        positions[start : start + length] = grid_positions(grid)
    assert torch.equal(segments.positions_V3, positions[segments.indices_V])


def test_a_grid_must_have_the_tokens_of_its_sample():
    with pytest.raises(BatchError, match=r"12 tokens cannot have a grid of 2 x 2 x 2 = 8"):
        segments_of(SequenceLayout.from_lengths([12]), ((2, 2, 2),), "spatial")


@given(spread_packs())
@settings(max_examples=60, deadline=None)
def test_owners_have_equal_shares(case):
    """The load of a rank is at most an equal share plus one segment less one token."""
    layout, grids, kind, size, split, _ = case
    segments, indices_RT = segments_of(layout, grids, kind), context_partition(layout, size, split).indices_RT
    counts = torch.zeros(len(segments.lengths_K), size, dtype=torch.int64)
    for rank, rows in enumerate(indices_RT.tolist()):
        for segment, members in enumerate(segment_lists(layout, grids, kind)):
            counts[segment, rank] = len(set(members) & set(rows))
    owners = assign_owners(segments.lengths_K, counts)
    load = torch.zeros(size, dtype=torch.int64).index_add(0, owners, segments.lengths_K)
    assert load.max() <= -(-layout.valid_tokens // size) + segments.lengths_K.max() - 1


def delivered(plans: list[list], indices_RT: Tensor) -> list[Tensor]:
    """Exchange token indices between all ranks; return the indices that each owner's projection gathers, -1 for zeros.

    Args:
        plans: by context-parallel rank, then tensor-parallel rank.
    """
    size, tp_size = len(plans), len(plans[0])
    mail: dict[tuple[int, int, int], Tensor] = {}
    for rank in range(size):
        for part, mine in enumerate(indices_RT[rank].chunk(tp_size)):
            plan: ExchangePlan = plans[rank][part].exchange
            assert plan.tokens_in == len(mine)
            for to, rows in enumerate(mine[plan.send_index].split(list(plan.send_counts))):
                mail[rank, to, part] = rows
    gathered = []
    for to in range(size):
        parts = []
        for part in range(tp_size):
            plan = plans[to][part].exchange
            arrived = [mail[rank, to, part] for rank in range(size)]
            assert [len(rows) for rows in arrived] == list(plan.receive_counts)
            parts.append(torch.full((plan.tokens_out,), -1).index_copy(0, plan.receive_index, torch.cat(arrived)))
        assert len({len(rows) for rows in parts}) == 1, "tensor-parallel ranks must have equally many tokens"
        gathered.append(torch.cat(parts))
    return gathered


@given(spread_packs())
@settings(max_examples=80, deadline=None)
def test_complete_segments_arrive_once(case):
    """Every segment arrives on one rank, in its order, with its positions; no token is lost or duplicated."""
    layout, grids, kind, size, split, tp_size = case
    indices_RT = context_partition(layout, size, split).indices_RT
    args = (layout, grids, kind, size, split)
    by_rank = [[_owned_segments(*args, rank, i, tp_size) for i in range(tp_size)] for rank in range(size)]
    exchanges = {plan.exchange is not None for plans in by_rank for plan in plans}
    assert len(exchanges) == 1, "all ranks take part in an exchange, or none"
    gathered = delivered(by_rank, indices_RT) if exchanges.pop() else list(indices_RT)
    found = []
    for plans, rows in zip(by_rank, gathered):
        for plan in plans:
            if plan.positions_T3 is not None:
                at = segments_of(layout, grids, kind)
                positions = torch.zeros(layout.total_tokens, 3, dtype=torch.int64).index_copy(
                    0, at.indices_V, at.positions_V3
                )
                assert torch.equal(plan.positions_T3[rows >= 0], positions[rows[rows >= 0]])
        if plans[0].layout is not None:
            order = plans[0].order
            in_order = rows if order is None else rows[order.send_index]
            found += [part.tolist() for part in in_order.split(list(plans[0].layout.lengths))]
    assert sorted(found) == sorted(segment_lists(layout, grids, kind))


@given(spread_packs())
@settings(max_examples=60, deadline=None)
def test_split_segments_are_in_order_on_every_rank(case):
    """The block of each rank has the token count of every local segment, in the order of the permutation."""
    layout, grids, kind, size, split, _ = case
    indices_RT = context_partition(layout, size, split).indices_RT
    segments = _split_segments(layout, grids, kind, size, split)
    for rows, order, block in zip(indices_RT, segments.orders, segments.partition.blocks()):
        assert block.total_tokens == len(rows)
        parts = rows[order.send_index][: block.valid_tokens].split(list(block.lengths))
        expected = [[r for r in members if r in set(rows.tolist())] for members in segment_lists(layout, grids, kind)]
        assert [part.tolist() for part in parts] == expected


@pytest.mark.parametrize("split", SPLITS)
def test_local_frames_are_not_sent(split: str):
    """Spatial attention sends nothing if every frame is local to one rank, also in packs of several clips."""
    chunks = 4 if split == "contiguous" else 8
    grids = ((chunks, 3, 2), (2 * chunks, 1, 5))
    layout = a_pack(grids)
    assert all(_owned_segments(layout, grids, "spatial", 4, split, rank, 0, 1).exchange is None for rank in range(4))
    assert _owned_segments(layout, grids, "temporal", 4, split, 0, 0, 1).exchange is not None


def test_an_image_is_sent_to_one_rank():
    """Frames of the clip are local. Only the image is sent, because it is one segment that is split over all ranks."""
    grids = ((4, 2, 2), (1, 2, 2))
    args = (a_pack(grids), grids, "spatial", 4, "contiguous")
    sent = torch.tensor([_owned_segments(*args, rank, 0, 1).exchange.send_counts for rank in range(4)])
    assert sent.diagonal().tolist() == [5, 4, 4, 4]
    assert sent.sum() == 20
    assert (sent - sent.diagonal().diag()).nonzero().tolist() == [[1, 0], [2, 0], [3, 0]]


def test_one_unpadded_rank_only_reorders_columns():
    layout = a_pack(((2, 2, 2),))
    assert _one_rank_segments(layout, ((2, 2, 2),), "spatial").order is None
    assert _one_rank_segments(layout, ((2, 2, 2),), "temporal").order.send_index.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
