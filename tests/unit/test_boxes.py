"""Boxes cover a range: every element once, in order, with few boxes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dit.boxes import Box, Part, boxes_of_range

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def elements(box, shape):
    """Return the flat indices of a box."""
    flat = torch.arange(math.prod(shape)).view(shape)
    return flat[box.slices_in(Box.of(shape))].flatten().tolist()


@given(ranges())
def test_boxes_cover_the_range_in_order(drawn):
    shape, start, stop = drawn
    boxes = list(boxes_of_range(shape, start, stop))
    assert [i for box in boxes for i in elements(box, shape)] == list(range(start, stop))
    assert all(box.numel == len(elements(box, shape)) for box in boxes)


@given(ranges())
def test_a_range_is_a_few_boxes(drawn):
    shape, start, stop = drawn
    assert len(list(boxes_of_range(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


def test_complete_rows_are_one_box():
    assert list(boxes_of_range((6, 4), 4, 20)) == [Box((1, 0), (4, 4))]
    assert list(boxes_of_range((6, 4), 0, 24)) == [Box((0, 0), (6, 4))]
    assert list(boxes_of_range((4, 4), 3, 13)) == [Box((0, 3), (1, 1)), Box((1, 0), (2, 4)), Box((3, 0), (1, 1))]
    assert list(boxes_of_range((), 0, 1)) == [Box((), ())]


@given(ranges(), st.data())
def test_the_overlap_is_the_intersection(drawn, data):
    shape, start, stop = drawn
    cut = data.draw(st.integers(0, math.prod(shape)))
    for a in boxes_of_range(shape, start, stop):
        for b in boxes_of_range(shape, 0, cut):
            common = a.overlap(b)
            expected = set(elements(a, shape)) & set(elements(b, shape))
            assert set(elements(common, shape) if common else []) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_of_replicas_are_equal_and_cover_the_range(count):
    part = Part((10, 4), (5, 4), (5, 0), start=3, stop=18)
    shares = [part.share(i, count) for i in range(count)]
    assert [i for share in shares for i in range(share.start, share.stop)] == list(range(3, 18))
    assert max(s.stop - s.start for s in shares) - min(s.stop - s.start for s in shares) <= 1


def test_views_have_the_position_of_the_part_and_share_its_memory():
    """A tensor is split in two along its second dimension; this rank has elements 3 to 9 of the right half."""
    full = torch.arange(24.0).view(4, 6)
    local = full[:, 3:].contiguous()
    owned = local.flatten()[3:10].clone()
    part = Part((4, 6), (4, 3), (0, 3), start=3, stop=10)
    rebuilt = torch.full((4, 6), -1.0)
    for box, view in part.views(owned, start=3):
        assert torch.equal(view, full[box.slices_in(Box.of((4, 6)))])
        rebuilt[box.slices_in(Box.of((4, 6)))] = view
        view.zero_()
    assert (rebuilt >= 0).sum() == 7
    assert owned.abs().sum() == 0
