"""Segments finer than samples: which rows they have, who gets them, and how the rows travel. Laws of the plans."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dit.context_parallel.exchange import Route
from dit.context_parallel.partition import context_rows
from dit.context_parallel.segment_attention import _cut, _in_order, _whole
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
    """Return a pack, its grids, a kind, context ranks, split, and tensor ranks that share rows."""
    size, tp_size = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (4, 2)]))
    grids = tuple(draw(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=1, max_size=4)))
    layout = a_pack(grids, 2 * size * tp_size, size * tp_size * draw(st.integers(0, 2)))
    return layout, grids, draw(st.sampled_from(KINDS)), size, draw(st.sampled_from(SPLITS)), tp_size


def segment_lists(layout: SequenceLayout, grids: Grids, kind: str) -> list[list[int]]:
    """Return the rows of each segment, by loops."""
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
    assert segments.rows_V.tolist() == [row for rows in expected for row in rows]
    positions = torch.zeros(layout.total_tokens, 3, dtype=torch.int64)
    for start, length, grid in zip(layout.starts, layout.lengths, grids):
        positions[start : start + length] = grid_positions(grid)
    assert torch.equal(segments.positions_V3, positions[segments.rows_V])


def test_a_grid_must_have_the_tokens_of_its_sample():
    with pytest.raises(BatchError, match=r"12 tokens cannot have a grid of 2 x 2 x 2 = 8"):
        segments_of(SequenceLayout.from_lengths([12]), ((2, 2, 2),), "spatial")


@given(spread_packs())
@settings(max_examples=60, deadline=None)
def test_owners_have_equal_shares(case):
    """No rank has more than an equal share and, short of a row, one segment."""
    layout, grids, kind, size, split, _ = case
    segments, rows_RT = segments_of(layout, grids, kind), context_rows(layout, size, split).rows_RT
    held = torch.zeros(len(segments.lengths_K), size, dtype=torch.int64)
    for rank, rows in enumerate(rows_RT.tolist()):
        for segment, members in enumerate(segment_lists(layout, grids, kind)):
            held[segment, rank] = len(set(members) & set(rows))
    owners = assign_owners(segments.lengths_K, held)
    load = torch.zeros(size, dtype=torch.int64).index_add(0, owners, segments.lengths_K)
    assert load.max() <= -(-layout.valid_tokens // size) + segments.lengths_K.max() - 1


def delivered(whole: list[list], rows_RT: Tensor) -> list[Tensor]:
    """Carry the number of each row along the routes of all ranks: what each owner's projection gathers, -1 for zeros.

    Args:
        whole: the plans, by context-parallel rank, then tensor-parallel rank.
    """
    size, tp_size = len(whole), len(whole[0])
    mail: dict[tuple[int, int, int], Tensor] = {}
    for rank in range(size):
        for part, mine in enumerate(rows_RT[rank].chunk(tp_size)):
            route: Route = whole[rank][part].travel
            assert route.rows_in == len(mine)
            for to, rows in enumerate(mine[route.take].split(list(route.sent))):
                mail[rank, to, part] = rows
    gathered = []
    for to in range(size):
        parts = []
        for part in range(tp_size):
            route = whole[to][part].travel
            arrived = [mail[rank, to, part] for rank in range(size)]
            assert [len(rows) for rows in arrived] == list(route.received)
            parts.append(torch.full((route.rows_out,), -1).index_copy(0, route.put, torch.cat(arrived)))
        assert len({len(rows) for rows in parts}) == 1, "tensor-parallel ranks must have equally many rows"
        gathered.append(torch.cat(parts))
    return gathered


@given(spread_packs())
@settings(max_examples=80, deadline=None)
def test_whole_segments_arrive_once(case):
    """Every segment comes to one rank, in its order, with its positions, and no row is lost or doubled."""
    layout, grids, kind, size, split, tp_size = case
    rows_RT = context_rows(layout, size, split).rows_RT
    whole = [[_whole(layout, grids, kind, size, split, r, i, tp_size) for i in range(tp_size)] for r in range(size)]
    travels = {plan.travel is not None for plans in whole for plan in plans}
    assert len(travels) == 1, "all ranks take part in an exchange, or none"
    gathered = delivered(whole, rows_RT) if travels.pop() else list(rows_RT)
    found = []
    for plans, rows in zip(whole, gathered):
        for plan in plans:
            if plan.positions_T3 is not None:
                at = segments_of(layout, grids, kind)
                positions = torch.zeros(layout.total_tokens, 3, dtype=torch.int64).index_copy(
                    0, at.rows_V, at.positions_V3
                )
                assert torch.equal(plan.positions_T3[rows >= 0], positions[rows[rows >= 0]])
        if plans[0].layout is not None:
            order = plans[0].order
            in_order = rows if order is None else rows[order.take]
            found += [part.tolist() for part in in_order.split(list(plans[0].layout.lengths))]
    assert sorted(found) == sorted(segment_lists(layout, grids, kind))


@given(spread_packs())
@settings(max_examples=60, deadline=None)
def test_cut_segments_lie_in_order_on_every_rank(case):
    """Each rank's block says how many rows of which segment it has, in the order they were brought to."""
    layout, grids, kind, size, split, _ = case
    rows_RT, cut = context_rows(layout, size, split).rows_RT, _cut(layout, grids, kind, size, split)
    for rows, order, block in zip(rows_RT, cut.orders, cut.shares.blocks()):
        assert block.total_tokens == len(rows)
        parts = rows[order.take][: block.valid_tokens].split(list(block.lengths))
        expected = [[r for r in members if r in set(rows.tolist())] for members in segment_lists(layout, grids, kind)]
        assert [part.tolist() for part in parts] == expected


@pytest.mark.parametrize("split", SPLITS)
def test_whole_frames_stay_where_they_are(split: str):
    """Spatial attention sends nothing where every rank holds whole frames, in packs of several clips too."""
    chunks = 4 if split == "contiguous" else 8
    grids = ((chunks, 3, 2), (2 * chunks, 1, 5))
    layout = a_pack(grids)
    assert all(_whole(layout, grids, "spatial", 4, split, rank, 0, 1).travel is None for rank in range(4))
    assert _whole(layout, grids, "temporal", 4, split, 0, 0, 1).travel is not None


def test_an_image_goes_whole_to_one_rank():
    """The frames of the clip stay; only the image, whose one segment every rank holds a part of, moves."""
    grids = ((4, 2, 2), (1, 2, 2))
    routes = [_whole(a_pack(grids), grids, "spatial", 4, "contiguous", rank, 0, 1).travel for rank in range(4)]
    leaving = torch.tensor([route.sent for route in routes])
    assert leaving.diagonal().tolist() == [5, 4, 4, 4]
    assert leaving.sum() == 20
    assert (leaving - leaving.diagonal().diag()).nonzero().tolist() == [[1, 0], [2, 0], [3, 0]]


def test_one_unpadded_rank_orders_columns_alone():
    layout = a_pack(((2, 2, 2),))
    assert _in_order(layout, ((2, 2, 2),), "spatial").order is None
    assert _in_order(layout, ((2, 2, 2),), "temporal").order.take.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
