"""FLOP formulas of packed attention, and the cache of sorted tables."""

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


def packed(backward, key_heads=2):
    """Return the arguments of a packed attention with 4 query heads and more pairs than an int32 counts."""
    query, key = torch.empty(70_006, 4, 8, device="meta"), torch.empty(60_009, key_heads, 8, device="meta")
    grads = [query] if backward else []
    outputs = [query, query[..., 0]] if backward else []
    return [*grads, query, key, key, *outputs, *CU_SEQLENS, 70_000, 60_000]


def flops(name, pairs):
    """Two matrix products forward, five backward, for 4 heads of 8 channels."""
    return (5 if "backward" in name else 2) * 2 * pairs * 4 * 8


@pytest.mark.parametrize("name", OPS)
def test_packed_attention_is_counted_by_pairs_of_query_and_key(name):
    op, args = OPS[name](), packed("backward" in name)
    assert counter.flop_formulas()[op](*args) == flops(name, 3 * 5 + 69_997 * 60_000 + 1 * 4)


@pytest.mark.parametrize("name", OPS)
def test_segments_without_values_count_as_the_longest(name):
    args = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in packed("backward" in name)]
    assert counter.flop_formulas()[OPS[name]()](*args) == flops(name, 4 * 70_000 * 60_000)


@pytest.mark.parametrize("name", OPS)
def test_packed_attention_counts_equal_those_of_torch(name):
    """If this version has a formula: 2.11 has none for varlen, and none for fewer heads of keys than of queries."""
    op, args = OPS[name](), packed("backward" in name, key_heads=4)
    if op not in flop_registry:
        pytest.skip(f"torch {torch.__version__} has no formula for {op}")
    assert counter.flop_formulas()[op](*args) == flop_registry[op](*args)


def test_the_peak_of_a_backward_pass_in_half_precision_has_the_sums_of_dq():
    """FlashAttention rounds the queries of each segment up to 128: in temporal attention, most of its memory."""
    more = {}
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.empty(30, 4, 2, 64, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
        grad = torch.empty_like(out)
        with counter.StepCounter() as counting:
            out.backward(grad)
        counting.phase(counter.PHASES[0])
        more[dtype] = counting.trace.dq_bytes / q.nbytes
        assert counting.trace.peak == counting.trace.peak_bytes[counter.PHASES[0]] + counting.trace.dq_bytes
    assert more[torch.float32] == 0
    assert 126 <= more[torch.bfloat16] <= 128  # there are more gradients after the backward pass of attention
    query, cu_seqlens = torch.empty(60, 4, 64, dtype=torch.half, device="meta"), torch.arange(0, 61, 2)
    assert counter._bytes_of_sums(*[query] * 6, cu_seqlens, cu_seqlens, 2, 2) == (128 + 30 * 128) * 4 * 64 * 4


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_gradients_of_a_convolution_cost_as_much_as_its_forward_pass(groups, transposed):
    """Also for grouped channels, for which torch's formula counts weights between all channels."""
    x, weight = torch.empty(2, 8, 5, 7, device="meta"), torch.empty(8, 8 // groups, 3, 3, device="meta")
    run = torch.conv_transpose2d if transposed else torch.conv2d
    with counter.StepCounter() as counted:
        out = run(x.requires_grad_(), weight.requires_grad_(), groups=groups)
        forward = counted.trace.flops
        torch.autograd.grad(out, (x, weight), torch.empty_like(out))
    pixels = 5 * 7 if transposed else 3 * 5
    assert forward == 2 * 2 * pixels * 9 * 8 * 8 // groups
    assert counted.trace.flops == 3 * forward


def test_equal_tables_are_sorted_once_and_counted_each_time():
    """The router of every layer sorts equal tables, and changes the result in place."""
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


def test_large_tables_of_floats_have_no_values_and_the_same_counts():
    """Computing sines of the positions of 8,192 tokens took half the time of a plan, and no decision reads them."""
    positions = torch.arange(2 * counter.REAL_FLOATS)
    counts = []
    for few in (counter.REAL_FLOATS, len(positions)):
        counting = counter.StepCounter()
        with counting:
            angle = positions[:few].double()
            doubled = positions[:few] * 2
            sine = angle.sin()
        assert sine.is_meta == (few > counter.REAL_FLOATS)
        assert doubled.equal(2 * positions[:few])  # integers keep their values
        counts.append(counting.trace.moved_bytes)
    assert counts[1] == 2 * counts[0]


def test_an_operation_without_results_allocates_no_memory():
    """Torch has no implementation of the fused update for the meta device."""
    numbers = dict.fromkeys(("beta1", "beta2", "weight_decay", "eps"), 0.5)
    options = {"lr": torch.ones(()), **numbers, "amsgrad": False, "maximize": False}
    with counter.StepCounter():
        values = [torch.zeros(1 << 44)]
        arguments = values, values, values, values, [], [torch.ones(())]
        assert torch.ops.aten._fused_adamw_.tensor_lr(*arguments, **options) is None


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_keeps_the_memory_format(form):
    """Otherwise, layers that view pictures as tokens would copy them."""
    x, weight = torch.empty(2, 8, 5, 7, device="meta").to(memory_format=form), torch.empty(8, 8, 3, 3, device="meta")
    with counter.StepCounter():
        out = torch.conv2d(x, weight, padding=1)
    assert out.is_contiguous(memory_format=form)


def test_tables_that_are_copied_to_the_device_keep_their_values():
    with counter.StepCounter() as counting:
        lengths, tokens = torch.tensor([2, 3]).to("cpu"), torch.ones(5, 2)
        rows = tokens[torch.arange(4, device=tokens.device)].to("cpu")
    assert lengths.tolist() == [2, 3]
    assert tokens.is_meta
    assert rows.is_meta
    assert counting.live >= tokens.nbytes
