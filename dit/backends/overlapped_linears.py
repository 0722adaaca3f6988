"""Parallel linears that overlap the communication of sequence parallelism with their products.

Torch's operations on symmetric memory split a product into one part for each rank, and compute one part while another
is copied between GPUs:

```
    column-parallel    forward     all-gather x, y = x W^T       one operation
                       backward    all-gather x                  starts first, runs during the next line
                                   dx = dy W, reduce-scatter     one operation
                                   dW = dy^T x
    row-parallel       forward     y = x W^T, reduce-scatter     one operation
                       backward    all-gather dy, dx = dy W      one operation
                                   dW = dy^T x                   of the gathered dy
```

No GPU has run them in this project yet. In torch's test mode, its fallbacks run functional collectives instead.

Shape suffixes: t tokens of this rank, T tokens of all tensor-parallel ranks, K input and N output features of this
rank's part of the weight.
"""

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dit.backends.linears import ColumnLinear, RowLinear


class OverlappedColumnLinear(ColumnLinear):
    """`ColumnLinear` whose gather of tokens overlaps with the product; a replicated input has no gather."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not kwargs["sequence_parallel"]:
            return super()._forward_impl(input, weight, *args, **kwargs)
        y_TN: Tensor = _AllGatherMatmul.apply(input, weight, self.tp_group)
        bias_N = kwargs["bias"]
        return y_TN if bias_N is None else y_TN + bias_N


class OverlappedRowLinear(RowLinear):
    """`RowLinear` whose sum over ranks overlaps with the product."""

    def _sharded(self, x_TK: Tensor) -> Tensor:
        y_tN: Tensor = _MatmulReduceScatter.apply(x_TK, self.weight, self.tp_group)
        return y_tN if self.bias is None or self.skip_bias_add else y_tN + self.bias


def _gather_multiply(
    x_tK: Tensor, weight_KN: Tensor, group: Any, *, returns_x: bool
) -> tuple[Optional[Tensor], Tensor]:
    """Return x of all ranks if `returns_x`, and its product with the weight."""
    x_TK, (y_TN,) = torch.ops.symm_mem.fused_all_gather_matmul(
        x_tK.contiguous(), [weight_KN], 0, group.group_name, return_A=returns_x
    )
    return x_TK, y_TN


def _multiply_scatter(x_TK: Tensor, weight_KN: Tensor, group: Any) -> Tensor:
    """Return this rank's tokens of the product, summed over the ranks."""
    y_tN: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x_TK.contiguous(), weight_KN, "sum", 0, group.group_name
    )
    return y_tN


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    group: Any


class _AllGatherMatmul(torch.autograd.Function):
    """The products of a column-parallel layer. Only the local tokens are saved; the backward pass gathers them."""

    @staticmethod
    def forward(ctx: _Context, x_tK: Tensor, weight_NK: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x_tK, weight_NK)
        return _gather_multiply(x_tK, weight_NK.t(), group, returns_x=False)[1]

    @staticmethod
    def backward(ctx: _Context, grad_TN: Tensor) -> tuple[Optional[Tensor], ...]:
        x_tK, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        gather = None
        if needs_weight:
            x_TK = x_tK.new_empty(grad_TN.shape[0], x_tK.shape[1])
            gather = dist.all_gather_into_tensor(x_TK, x_tK.contiguous(), group=ctx.group, async_op=True)
        grad_x = _multiply_scatter(grad_TN, weight_NK, ctx.group) if needs_x else None
        if gather is None:
            return grad_x, None, None
        gather.wait()
        return grad_x, grad_TN.t() @ x_TK, None


class _MatmulReduceScatter(torch.autograd.Function):
    """The products of a row-parallel layer."""

    @staticmethod
    def forward(ctx: _Context, x_TK: Tensor, weight_NK: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x_TK, weight_NK)
        return _multiply_scatter(x_TK, weight_NK.t(), group)

    @staticmethod
    def backward(ctx: _Context, grad_tN: Tensor) -> tuple[Optional[Tensor], ...]:
        x_TK, weight_NK = ctx.saved_tensors
        grad_TN, grad_x = _gather_multiply(grad_tN, weight_NK, ctx.group, returns_x=ctx.needs_input_grad[1])
        return grad_x, None if grad_TN is None else grad_TN.t() @ x_TK, None
