"""Attention cases that every implementation must pass on every device."""

from dataclasses import dataclass, replace
from typing import Optional

import torch
from torch import Tensor

from dit.kernels.attention import Attention, reference_attention
from dit.layout import SequenceLayout


@dataclass(frozen=True)
class AttentionCase:
    """Segment lengths and padding of queries and keys; keys default to those of the queries.

    Attributes:
        empty: number of empty samples of packs of fixed size; None for other packs.
    """

    name: str
    lengths_q: tuple[int, ...]
    lengths_k: Optional[tuple[int, ...]] = None
    multiple_of_q: int = 1
    multiple_of_k: int = 1
    tail_q: int = 0
    tail_k: int = 0
    empty: Optional[int] = None
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 16

    def layouts(self, device: torch.device | str = "cpu") -> tuple[SequenceLayout, SequenceLayout]:
        """Return the layouts of queries and keys; self-attention shares one object."""
        layout_q = self._fixed(_layout(self.lengths_q, self.multiple_of_q, self.tail_q, device))
        if self.lengths_k is None:
            return layout_q, layout_q
        return layout_q, self._fixed(_layout(self.lengths_k, self.multiple_of_k, self.tail_k, device))

    def _fixed(self, layout: SequenceLayout) -> SequenceLayout:
        if self.empty is None:
            return layout
        lengths, padded = (x + (0,) * self.empty for x in (layout.lengths, layout.padded_lengths))
        return replace(layout, lengths=lengths, padded_lengths=padded, is_fixed=True)

    def qkv(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """Draw q, k, v; they are equal on every device."""
        layout_q, layout_k = self.layouts()
        generator = torch.Generator().manual_seed(11)
        shapes = [(layout_q.total_tokens, self.heads), *[(layout_k.total_tokens, self.kv_heads)] * 2]
        return tuple(torch.randn(*s, self.head_size, generator=generator).to(dtype).to(device) for s in shapes)


def _layout(lengths: tuple[int, ...], multiple_of: int, tail: int, device: torch.device | str) -> SequenceLayout:
    total = SequenceLayout.from_lengths(lengths, multiple_of=multiple_of).total_tokens + tail
    return SequenceLayout.from_lengths(lengths, multiple_of=multiple_of, total_tokens=total, device=device)


CASES = [
    AttentionCase("dense", (12, 12, 12)),
    AttentionCase("one_sample", (33,)),
    AttentionCase("ragged", (12, 5, 33, 5, 1)),
    AttentionCase("equal_but_padded", (6, 6, 6), multiple_of_q=8),
    AttentionCase("ragged_padded", (12, 5, 33, 5, 1), multiple_of_q=8, tail_q=8),
    AttentionCase("tail_only", (7, 9), tail_q=16),
    AttentionCase("cross_dense", (8, 8), (3, 3)),
    AttentionCase("cross_ragged_keys", (8, 8), (3, 20)),
    AttentionCase("cross_ragged_queries", (8, 21), (4, 4)),
    AttentionCase("cross_padded", (8, 21, 8), (4, 7, 1), multiple_of_q=4, multiple_of_k=8, tail_q=4, tail_k=8),
    AttentionCase("fixed", (12, 5, 7), multiple_of_q=4, tail_q=8, empty=2),
    AttentionCase("fixed_cross", (8, 21), (4, 7), multiple_of_k=8, tail_q=4, tail_k=8, empty=1),
    AttentionCase("one_head", (12, 5), heads=1, kv_heads=1, head_size=8),
]
GQA_CASES = [
    AttentionCase("gqa_dense", (12, 12), kv_heads=2),
    AttentionCase("gqa_ragged_padded", (12, 5, 7), multiple_of_q=8, kv_heads=1),
    AttentionCase("gqa_cross", (12, 5), (3, 9), multiple_of_k=4, kv_heads=2),
]


@dataclass(frozen=True)
class Result:
    """Output and gradients of a run, in float32 on the host."""

    out: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor


def run(attention: Attention, case: AttentionCase, qkv: tuple[Tensor, ...]) -> Result:
    """Run forward and backward with a seeded output gradient, zero in padding rows as with a masked loss."""
    layout_q, layout_k = case.layouts(qkv[0].device)
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv)
    out = attention(q, k, v, layout_q, layout_k)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(12)).to(out)
    out.backward(cotangent * layout_q.valid_T[:, None, None])
    grads = [x.grad if x.grad is not None else torch.zeros_like(x) for x in (q, k, v)]
    return Result(*(x.detach().float().cpu() for x in (out, *grads)))


def exact(case: AttentionCase, qkv: tuple[Tensor, ...]) -> Result:
    """Run the reference in float32 on the same values, with grouped key heads repeated."""
    groups = case.heads // case.kv_heads

    def ungrouped(q: Tensor, k: Tensor, v: Tensor, layout_q: SequenceLayout, layout_k: SequenceLayout) -> Tensor:
        return reference_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), layout_q, layout_k
        )

    return run(ungrouped, case, tuple(x.float() for x in qkv))


def check(attention: Attention, case: AttentionCase, qkv: tuple[Tensor, ...], *, rtol: float) -> None:
    """Compare outputs and all gradients with the reference, and require exact zeros in padding rows."""
    actual, expected = run(attention, case, qkv), exact(case, qkv)
    layout_q, layout_k = case.layouts()
    for name, layout in (("out", layout_q), ("grad_q", layout_q), ("grad_k", layout_k), ("grad_v", layout_k)):
        got, want = getattr(actual, name), getattr(expected, name)
        error = (got - want).norm() / want.norm().clamp(min=1e-12)
        assert error <= rtol, f"{name} is off by {error:.2e}"
        assert not got[~layout.valid_T].any(), f"{name} is not zero in padding rows"
