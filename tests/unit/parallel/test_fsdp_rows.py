"""No shard of a Megatron-FSDP bucket ends inside a row."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=12)


@pytest.fixture(scope="module", autouse=True)
def megatron(one_rank_world):
    """Install the redirections, without which Megatron-FSDP cannot be imported on CPU."""


def chunk_of(shapes):
    """Return the chunk size that Megatron-FSDP uses for a bucket of these parameters, the widest rows first."""
    chunk = shapes[0][1]
    for rows, width in shapes:
        aligned = width == chunk or (chunk % width == 0 and rows * width % chunk == 0)
        if not aligned and rows * width >= chunk:
            chunk = math.lcm(chunk, width)
    return chunk


def cuts(layout, shapes, world_size):
    """List (parameter, boundary) for each boundary between two shards that is inside a row."""
    config = SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params")
    sizes = [torch.Size(shape) for shape in shapes]
    arguments = (sizes, 0, world_size, True, config)
    items, bucket, shard = layout(*arguments, chunk_size_factor=chunk_of(shapes))
    assert shard.size * world_size == bucket.size
    spans = sorted((x.global_data_index, x.global_data_index + x.size) for x in items.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= bucket.size
    assert [items[i].shape for i in range(len(shapes))] == sizes
    marks = range(shard.size, bucket.size, shard.size)
    inside = ((i, m) for i, x in items.items() for m in marks if 0 < m - x.global_data_index < x.size)
    return [(i, m) for i, m in inside if (m - items[i].global_data_index) % shapes[i][1]]


@settings(max_examples=300, deadline=None)
@given(shapes=SHAPES, world_size=st.sampled_from([2, 3, 4, 8, 64]))
def test_shards_end_between_rows(shapes, world_size):
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    from dit.parallel.fsdp_patches import shard_between_rows

    shard_between_rows()
    shapes = sorted(shapes, key=lambda shape: -shape[1])
    assert cuts(param_and_grad_buffer.build_data_parallel_buffer_index, shapes, world_size) == []


def test_megatron_fsdp_without_the_patch_splits_rows():
    """If this fails, Megatron-Core does it without the patch, which can then be removed."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    from dit.parallel.fsdp_patches import shard_between_rows

    shard_between_rows()
    original = param_and_grad_buffer.build_data_parallel_buffer_index.__wrapped__
    assert cuts(original, [(6, 17), (12, 13)], world_size=2) == [(1, 221)]
