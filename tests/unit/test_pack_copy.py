"""Copying a pack through one buffer gives the same tensors and tables as separate copies, for every later pack, too."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit import layout as layouts
from dit import pack_copy
from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.context_parallel.shard_batch import shard
from dit.joint_layout import joint_layout
from dit.kernels.attention import _segments_with_padding
from dit.kernels.fused.blocks import blocks_of, blocks_of_passes
from dit.layers.tokens import pad_tokens, shard_tokens
from dit.layout import MOST_TABLES, TABLES, SequenceLayout
from dit.pack_copy import ALIGNMENT, copy_together
from dit.patchify import grid_positions
from dit.step.device_batches import PackCopy

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the buffer also for copies to host memory, so that values can be compared."""
    monkeypatch.setattr(layouts, "UNPINNED", ())
    monkeypatch.setattr(pack_copy, "page_locked", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(Tensor, "pin_memory", lambda values: values)


def pack(grids: list[tuple[int, int, int]], text_lengths: list[int]) -> PackedBatch:
    """Return a pack with texts, and with padding after each sample and at the end."""
    layout = SequenceLayout.from_lengths([t * h * w for t, h, w in grids], multiple_of=4, total_tokens=64)
    positions_T3 = torch.zeros(64, 3, dtype=torch.int64)
    for start, length, grid in zip(layout.starts, layout.lengths, grids):
        positions_T3[start : start + length] = grid_positions(grid)
    texts = SequenceLayout.from_lengths(text_lengths)
    context_KD = torch.randn(texts.total_tokens, 3).bfloat16()
    return PackedBatch(
        latents_TC=torch.randn(64, 5),
        positions_T3=positions_T3,
        layout=layout,
        sample_ids_S=torch.arange(len(grids)) + 7,
        grids=tuple(grids),
        keys=tuple(map(str, grids)),
        conditions=Conditions(context=Entry("text", context_KD, texts, torch.ones(len(grids)) > 0)),
    )


def read(batch: PackedBatch) -> Iterator[Tensor]:
    """Read the tables that networks read."""
    texts = batch.conditions["context"].layout
    assert texts is not None
    joint = joint_layout(texts, batch.layout)
    for layout in (batch.layout, texts, joint):
        for name in sorted(TABLES):
            value = getattr(layout, name)
            yield from value if isinstance(value, tuple) else (value,)
        yield from _segments_with_padding(layout, texts)[:2]
        for blocks in (blocks_of(layout, 8), *blocks_of_passes(layout, 64)):
            yield from (blocks.table, blocks.offsets)
    yield from (joint.order_J, joint.inverse_J)


def test_tensors_of_a_buffer_are_separate():
    sources = [torch.arange(5.0), torch.tensor([True, False]), torch.zeros(0, 3), torch.tensor(9), torch.arange(33)]
    first, *others = copied = copy_together(sources, CPU)
    for new, source in zip(copied, sources):
        assert new.dtype == source.dtype
        assert torch.equal(new, source)
        assert new.data_ptr() % 16 == 0 or not new.numel()
    assert len({x.untyped_storage().data_ptr() for x in copied}) == 1
    assert {x.storage_offset() * x.itemsize % ALIGNMENT for x in copied} == {0}
    weight = torch.ones(33, requires_grad=True)
    product = weight * others[-1]
    first.add_(1)  # must not count as a change of the tensors that autograd saved
    product.sum().backward()
    assert torch.equal(weight.grad, others[-1].float())


@pytest.mark.parametrize("cp", [1, 2])
def test_the_second_pack_has_all_tables_on_the_device(cp: int, monkeypatch: pytest.MonkeyPatch):
    """Its lengths differ from those of the first pack; the tables have equal values, and layers copy none."""
    packs = [
        pack([(1, 4, 4), (2, 3, 2), (1, 2, 2)], [3, 1, 2]),
        pack([(1, 2, 4), (3, 4, 2), (1, 1, 1), (1, 2, 2)], [2, 2, 5, 1]),
    ]
    copy, (first, second) = PackCopy(CPU), (shard(x, cp - 1, cp, "contiguous") for x in packs)
    list(read(copy(first)))
    moved = copy(second)
    fresh = shard(replace(packs[1]), cp - 1, cp, "contiguous")
    fresh = replace(fresh, layout=replace(fresh.layout), conditions=Conditions(context=_fresh(fresh)))
    expected = list(read(fresh))
    monkeypatch.setattr(layouts, "to_device", lambda *_: pytest.fail("a table is copied on its own"))
    for new, value in zip(read(moved), expected, strict=True):
        assert new.dtype == value.dtype
        assert torch.equal(new, value)
    assert moved.conditions["context"].values.untyped_storage().data_ptr() == (
        moved.layout.cu_seqlens.untyped_storage().data_ptr()
    )
    assert torch.equal(moved.conditions["context"].values, second.conditions["context"].values)
    assert torch.equal(moved.latents_TC, second.latents_TC)


@pytest.mark.parametrize("text_lengths", [([3, 1], [2, 3]), ([2, 3], [3, 1])], ids=["odd after even", "even after odd"])
def test_texts_of_one_of_two_packs_need_padding(text_lengths: tuple[list[int], ...]):
    """Two ranks share the tokens of each text (sequence parallelism)."""
    provider: Any = SimpleNamespace(token_multiple=2, sequence_parallel=True, tp_rank=1, tp_size=2)
    copy = PackCopy(CPU)
    for lengths in text_lengths:
        texts = copy(pack([(1, 4, 4), (1, 2, 3)], lengths)).conditions["context"].layout
        assert texts is not None
        tables = [
            blocks_of(shard_tokens(pad_tokens(layout, provider), provider)[0], 8).table
            for layout in (texts, SequenceLayout.from_lengths(lengths))
        ]
        assert torch.equal(*tables)


def _fresh(batch: PackedBatch):
    """Return the text with a new layout, which has no tables."""
    entry = batch.conditions["context"]
    assert entry.layout is not None
    return replace(entry, layout=replace(entry.layout))


@pytest.mark.parametrize("joint", [False, True])
def test_a_pack_is_freed_with_its_last_reference(joint: bool):
    """Without garbage collection: no table refers back to its layout, so the buffer is freed at once."""
    gc.disable()
    try:
        batch = pack([(1, 4, 4), (1, 2, 3)], [3, 5]).to(CPU)
        texts = batch.conditions["context"].layout
        assert texts is not None
        layout = joint_layout(texts, batch.layout) if joint else batch.layout
        for keys in (layout, *([] if joint else [texts])):
            _segments_with_padding(layout, keys)
        blocks_of(layout, 8)
        references = [weakref.ref(x) for x in (batch.layout, texts, layout)]
        del batch, texts, layout, keys
        assert [reference() for reference in references] == [None, None, None]
    finally:
        gc.enable()


def test_a_layout_of_many_packs_keeps_few_tables():
    layout = SequenceLayout.from_lengths([5, 6])
    for length in range(1, 2 * MOST_TABLES):
        layout.table(lambda a, b: b, SequenceLayout.from_lengths([length]))
    assert len(layout.tables) <= MOST_TABLES
