"""Laws of the partition of packs over context-parallel ranks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit import layout as layout_module
from dit.context_parallel.partition import ContextPartition, FixedPartition, context_partition
from dit.errors import BatchError
from dit.kernels.attention_blocks import _segments
from dit.layout import MOST_TABLES, SequenceLayout


@st.composite
def partitions(draw) -> tuple[SequenceLayout, ContextPartition]:
    size, split = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from(["contiguous", "load_balanced"]))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    multiple = 2 * size
    total = sum(-(-n // multiple) * multiple for n in lengths) + size * draw(st.integers(0, 3))
    layout = SequenceLayout.from_lengths(lengths, multiple_of=multiple, total_tokens=total)
    return layout, ContextPartition(layout, size, split)


@given(partitions())
@settings(max_examples=60, deadline=None)
def test_every_token_is_local_to_one_rank_and_every_sample_is_split_evenly(case):
    layout, partition = case
    by_rank = [partition.of_rank(rank) for rank in range(partition.size)]
    assert torch.equal(torch.cat(by_rank).sort().values, torch.arange(layout.total_tokens))
    padded = torch.tensor(layout.padded_lengths)
    inside = torch.arange(layout.total_tokens) < sum(layout.padded_lengths)
    for local in by_rank:
        assert torch.equal(local, local.sort().values)
        counts = layout.segment_ids_T[local][inside[local]].bincount(minlength=layout.num_samples)
        assert torch.equal(counts * partition.size, padded)


@given(partitions(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_local_tokens_are_a_pack(case, in_pairs):
    """For each token, the layout of a block agrees with the layout of the global pack."""
    layout, partition = case
    per_block = 2 if in_pairs and partition.size % 2 == 0 else 1
    for index, block in enumerate(partition.blocks(per_block)):
        ranks = range(index * per_block, (index + 1) * per_block)
        by_rank = torch.cat([partition.of_rank(rank) for rank in ranks])
        order = partition.order(index, per_block)
        ascending = by_rank if order is None else by_rank[order[0]]
        assert torch.equal(ascending, by_rank.sort().values)
        assert order is None or torch.equal(ascending[order[1]], by_rank)
        assert torch.equal(block.valid_T, layout.valid_T[ascending])
        assert torch.equal(block.segment_ids_T[block.valid_T], layout.segment_ids_T[ascending][block.valid_T])


def test_splits_have_the_documented_order():
    """Contiguous: rank r has chunk r. Load-balanced, as in Megatron-Core: chunks r and 2 cp - 1 - r."""
    layout = SequenceLayout.from_lengths([8, 5], multiple_of=8)
    contiguous, balanced = (ContextPartition(layout, 4, split) for split in ("contiguous", "load_balanced"))
    assert contiguous.of_rank(1).tolist() == [2, 3, 10, 11]
    assert [balanced.of_rank(r).tolist() for r in (0, 3)] == [[0, 7, 8, 15], [3, 4, 11, 12]]
    assert [block.lengths for block in contiguous.blocks()] == [(2, 2), (2, 2), (2, 1), (2, 0)]
    assert [block.lengths for block in balanced.blocks()] == [(2, 1), (2, 1), (2, 1), (2, 2)]


def test_one_contiguous_sample_needs_no_reordering():
    assert ContextPartition(SequenceLayout.from_lengths([16]), 4, "contiguous").order(0, 4) is None


def test_a_ring_of_any_size_has_all_its_tables_in_the_pack(monkeypatch):
    """A graph cannot compute a table again, because it has no lengths. Look-ups do not compare the blocks in turn."""
    compared, compare = [], layout_module._identities
    monkeypatch.setattr(layout_module, "_identities", lambda others: compared.append(others) or compare(others))
    size = 2 * MOST_TABLES
    layout = replace(SequenceLayout.from_lengths([size, 2 * size]), is_fixed=True)
    partition = FixedPartition(layout, size, "contiguous")
    for _ in range(2):
        blocks = partition.blocks()
        for block in blocks:
            _segments(layout, block)
            _segments(blocks[0], block)
    assert (len(layout.tables), len(blocks[0].tables)) == (2 * size, size)
    assert all(x is y for x, y in zip(blocks, partition.blocks()))
    assert len(compared) < 20 * size


def test_layers_share_one_partition():
    """A partition depends only on the global pack, so all layers get one object."""
    layout = SequenceLayout.from_lengths([8, 8])
    part = layout.select(torch.arange(3))
    assert context_partition(layout, 2, "contiguous") is context_partition(part, 2, "contiguous")
    assert context_partition(layout, 2, "contiguous") is not context_partition(layout, 2, "load_balanced")


@pytest.mark.parametrize(
    ("lengths", "total", "split", "message"),
    [
        ([6, 8], None, "contiguous", r"into 4 chunks .* samples have \[6\] .*multiple of 4"),
        ([4, 8], None, "load_balanced", r"into 8 chunks .* samples have \[4\] .*multiple of 8"),
        ([8, 8], 18, "contiguous", r"the tail 2; .* the pack to a multiple of 4"),
    ],
)
def test_uneven_packs_are_refused_with_a_cure(lengths, total, split, message):
    with pytest.raises(BatchError, match=message):
        ContextPartition(SequenceLayout.from_lengths(lengths, total_tokens=total), 4, split)
