"""Attention computed in blocks of keys: the merged blocks equal attention over all keys."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.context_parallel.attention import merge
from dit.context_parallel.partition import ContextPartition
from dit.errors import BatchError
from dit.kernels.attention_blocks import Attended, Block, BlockAttention, EagerBlocks, FlashBlocks
from dit.layout import SequenceLayout
from tests.unit.kernels.attention_cases import CASES, GQA_CASES, AttentionCase, check

RTOL = 2e-6  # float32 sums of up to 33 terms in another order


class OneBlock:
    """Attention with a block kernel and all keys in one block."""

    def __init__(self, kernel: BlockAttention) -> None:
        self.kernel = kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout_q: SequenceLayout, layout_k: SequenceLayout) -> Tensor:
        kernel = self.kernel

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *qkv: Tensor) -> Tensor:
                out, lse = kernel.forward(Block(*qkv, layout_q, layout_k))
                ctx.save_for_backward(*qkv, out, lse)
                return out

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
                q, k, v, *joined = ctx.saved_tensors
                return kernel.backward(grad, Block(q, k, v, layout_q, layout_k), Attended(*joined))

        return Function.apply(q, k, v)


def flash_on_cpu(is_fixed: bool = False) -> FlashBlocks:
    """Return `FlashBlocks` with an eager stand-in that has the signature of the packed kernel.

    Args:
        is_fixed: whether packs have a fixed size, so that segments may be empty.
    """
    blocks, eager = FlashBlocks(), EagerBlocks()

    def layouts(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> tuple[SequenceLayout, SequenceLayout]:
        assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32)
        lengths = [cu.diff().tolist() for cu in (cu_q, cu_k)]
        if is_fixed:
            assert all(max(n) <= bound for n, bound in zip(lengths, (max_q, max_k)))
        else:
            assert [max(n) for n in lengths] == [max_q, max_k]
            assert min(map(min, lengths)) > 0, "the kernel must not be asked about an empty segment"
        one, other = (SequenceLayout.from_lengths(n, may_be_empty=is_fixed) for n in lengths)
        return one, other

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug):
        assert (dropout, causal, debug) == (0.0, False, False)
        out, lse = eager.forward(Block(q, k, v, *layouts(cu_q, cu_k, max_q, max_k)))
        lse = lse.masked_fill(lse.isneginf(), torch.inf) if is_fixed else lse  # as FlashAttention 2
        return out.to(q.dtype), lse.T.contiguous(), None, None, None

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, unused):
        assert lse.shape == q.shape[1::-1]
        block = Block(q, k, v, *layouts(cu_q, cu_k, max_q, max_k))
        parts = eager.backward(grad, block, Attended(out, lse.T))
        return tuple(part.to(q.dtype) for part in parts)

    blocks._forward, blocks._backward = forward, backward
    return blocks


@pytest.mark.parametrize("direction", ["_forward", "_backward"])
def test_the_stand_in_has_the_signature_of_the_packed_kernel(direction: str) -> None:
    """Positional arguments have the order of torch's schema; the others are not used."""
    short = {"query": "q", "key": "k", "value": "v", "grad_out": "grad", "out": "out", "logsumexp": "lse"}
    short |= {"cum_seq_q": "cu_q", "cum_seq_k": "cu_k", "dropout_p": "dropout", "is_causal": "causal"}
    short |= {"return_debug_mask": "debug", "rng_state": "seed"}
    kernel, stand_in = (getattr(blocks, direction) for blocks in (FlashBlocks(), flash_on_cpu()))
    names = [x.name for x in kernel.default._schema.arguments if not x.kwarg_only]
    assert [short.get(name, name) for name in names] == list(inspect.signature(stand_in).parameters)


KERNELS = {"eager": lambda is_fixed=False: EagerBlocks(), "flash_bookkeeping": flash_on_cpu}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", [*CASES, *GQA_CASES], ids=lambda case: case.name)
def test_one_block_of_all_keys_equals_the_reference(case: AttentionCase, kernel: str):
    check(OneBlock(KERNELS[kernel](case.name.startswith("fixed"))), case, case.qkv(), rtol=RTOL)


@pytest.mark.parametrize(("limit", "most"), [("MOST_SEGMENTS", 3), ("MOST_SUMS", 2 * (128 + 4 * 128) * 64 - 1)])
def test_blocks_above_the_limits_of_the_packed_kernel_are_refused(limit: str, most: int, monkeypatch):
    monkeypatch.setattr(f"dit.kernels.attention_blocks.{limit}", most)
    layout, x = SequenceLayout.from_lengths([3, 1, 2, 4]), torch.randn(10, 2, 8)
    with pytest.raises(BatchError, match=r"4 segments of 10 local tokens .* parallel\.context_comm=a2a"):
        flash_on_cpu().forward(Block(x, x, x, layout, layout))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_blocks_sum_to_full_attention(kernel: str, is_fixed: bool):
    """Outputs are merged and gradients summed, also if a block or a rank has no token of a sample."""
    blocks = KERNELS[kernel](is_fixed)
    layout = SequenceLayout.from_lengths([12, 5, 33, 1], multiple_of=8, total_tokens=80)
    layout = replace(layout, is_fixed=is_fixed)
    rows = ContextPartition(layout, 4, "contiguous")
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(80, 2, 8, generator=generator) for _ in range(4))
    whole = Block(q, k, v, layout, layout)
    out, lse = blocks.forward(whole)
    dq, dk, dv = blocks.backward(grad, whole, Attended(out, lse))
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for mine in range(4):
        local = rows.of_rank(mine)
        joined = Attended(torch.zeros(20, 2, 8), torch.full((20, 2), -torch.inf))
        for other in range(4):
            theirs, pair = rows.of_rank(other), (rows.blocks()[mine], rows.blocks()[other])
            block = Block(q[local], k[theirs], v[theirs], *pair)
            joined = merge(joined, blocks.forward(block))
            parts = blocks.backward(grad[local], block, Attended(out[local], lse[local]))
            for total, rows_of, part in zip(sums, (local, theirs, theirs), parts):
                total[rows_of] += part
        torch.testing.assert_close(joined.out_TNH, out[local], rtol=RTOL, atol=RTOL)
        torch.testing.assert_close(joined.lse_TN, lse[local], rtol=RTOL, atol=RTOL)
    for total, exact in zip(sums, (dq, dk, dv)):
        torch.testing.assert_close(total, exact, rtol=RTOL, atol=5 * RTOL)


def test_padding_values_do_not_matter():
    """NaN in padding rows of any input reaches no output and no gradient."""
    layout = SequenceLayout.from_lengths([5, 3], multiple_of=4, total_tokens=16)
    padding = ~layout.valid_T[:, None, None]
    q, k, v, grad = (torch.randn(16, 2, 4).masked_fill(padding, float("nan")) for _ in range(4))
    for kernel in KERNELS.values():
        block = Block(q, k, v, layout, layout)
        attended = kernel().forward(block)
        assert attended.out_TNH.isfinite().all()
        assert all(x.isfinite().all() for x in kernel().backward(grad, block, attended))
