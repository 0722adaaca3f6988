"""Formulas of operations that torch's own take long for, and tables that are sorted again."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from dit.tracing import counter

CU_SEQLENS = (
    torch.tensor([0, 3, 70_000, 70_001, 70_006], dtype=torch.int32),
    torch.tensor([0, 5, 60_005, 60_009, 60_009]),
)
OPS = {
    "flash": lambda: torch.ops.aten._flash_attention_forward,
    "flash backward": lambda: torch.ops.aten._flash_attention_backward,
    "varlen": lambda: torch.ops.torch_attn._varlen_attn,
    "varlen backward": lambda: torch.ops.torch_attn._varlen_attn_backward,
}


def packed(backward):
    """Return the arguments of a packed attention: 4 heads of queries, 2 of keys, more pairs than an int32 counts."""
    query, key = torch.empty(70_006, 4, 8, device="meta"), torch.empty(60_009, 2, 8, device="meta")
    grads = [query] if backward else []
    outputs = [query, query[..., 0]] if backward else []
    return [*grads, query, key, key, *outputs, *CU_SEQLENS, 70_000, 60_000]


@pytest.mark.parametrize("name", OPS)
def test_packed_attention_is_counted_as_by_torch(name, monkeypatch):
    """And its segments are not gone through one by one: of two or of thousands, one is counted."""
    formulas, op, args = counter.flop_formulas(), OPS[name](), packed("backward" in name)
    assert formulas[op](*args) == flop_registry[op](*args) > 0
    products = []
    monkeypatch.setattr("torch.utils.flop_counter.bmm_flop", lambda *_: products.append(1) or 1)
    formulas[op](*args)
    assert len(products) == (5 if "backward" in name else 2)


@pytest.mark.parametrize("name", OPS)
def test_segments_without_values_are_taken_as_torch_takes_them(name):
    args = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in packed("backward" in name)]
    assert counter.flop_formulas()[OPS[name]()](*args) == flop_registry[OPS[name]()](*args) > 0


def test_equal_tables_are_sorted_once_and_counted_each_time():
    """As every layer's router does, which changes what it gets."""
    scores, other = torch.tensor([[2.0, 1.0], [1.0, 3.0], [2.0, 2.0]]), torch.zeros(3, 2)
    counting, moved = counter.StepCounter(), []
    for table in (scores, scores.clone(), other):
        before = counting.trace.moved_bytes
        with counting:
            order = table.argsort(dim=0, descending=True, stable=True)
        moved.append(counting.trace.moved_bytes - before)
        assert order.equal(table.argsort(dim=0, descending=True, stable=True))
        order.zero_()
    assert len(counting._sorted) == 2
    assert len(set(moved)) == 1
