"""A linear layer whose three products are quantised (see `dit.kernels.fp8`).

Weights and activations are saved unquantised, so optimizers, checkpoints, recompute and FSDP do not change. Biases are
added, and gradients are summed over ranks, after the products.
"""

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dit.kernels.fp8 import Fp8Products


def fp8_linear(
    products: Fp8Products,
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Optional[Tensor],
    *,
    group: Optional[Any] = None,
    sequence_parallel: bool = False,
    sum_gradient: bool = False,
) -> Tensor:
    """Return x W^T + b from quantised products.

    Args:
        group: tensor-parallel ranks, each with other rows of the weight.
        sequence_parallel: each rank of the group has other tokens of `x_TK`, which are gathered here.
        sum_gradient: every rank of the group has `x_TK`, whose gradient is summed over them.
    """
    y_TN: Tensor = _Fp8Linear.apply(x_TK, weight_NK, products, group, sequence_parallel, sum_gradient)
    return y_TN if bias_N is None else y_TN + bias_N


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    products: Fp8Products
    group: Any
    gathers: bool
    sum_gradient: bool


class _Fp8Linear(torch.autograd.Function):
    """The products of `fp8_linear`. Only the local tokens are saved; the backward pass gathers them again."""

    @staticmethod
    def forward(
        ctx: _Context,
        x_TK: Tensor,
        weight_NK: Tensor,
        products: Fp8Products,
        group: Any,
        sequence_parallel: bool,
        sum_gradient: bool,
    ) -> Tensor:
        ctx.products, ctx.group = products, group
        ctx.gathers, ctx.sum_gradient = sequence_parallel, sum_gradient
        all_TK = _gathered(x_TK, group) if sequence_parallel else x_TK
        amaxes = products.amaxes(all_TK, weight_NK)
        ctx.save_for_backward(x_TK, weight_NK, *amaxes)
        x = products.quantize(all_TK, "input", 1, *amaxes[:1])
        weight = products.quantize(weight_NK, "weight", 1, *amaxes[1:])
        return products.multiply(x, weight.transposed, x_TK.dtype)

    @staticmethod
    def backward(ctx: _Context, grad_TN: Tensor) -> tuple[Optional[Tensor], ...]:
        products, group = ctx.products, ctx.group
        x_TK, weight_NK, *amaxes = ctx.saved_tensors
        grad_amax = products.amaxes(grad_TN)
        grad_x: Optional[Tensor] = None
        grad_weight: Optional[Tensor] = None
        if ctx.needs_input_grad[0]:
            weight = products.quantize(weight_NK, "weight", 0, *amaxes[1:])
            grad_x = products.multiply(products.quantize(grad_TN, "gradient", 1, *grad_amax), weight, x_TK.dtype)
            if ctx.sum_gradient:
                dist.all_reduce(grad_x, group=group)
            elif ctx.gathers:
                all_grads, grad_x = grad_x, torch.empty_like(x_TK)
                dist.reduce_scatter_tensor(grad_x, all_grads, group=group)
        if ctx.needs_input_grad[1]:
            all_TK = _gathered(x_TK, group) if ctx.gathers else x_TK
            grad = products.quantize(grad_TN, "gradient", 0, *grad_amax)
            x = products.quantize(all_TK, "input", 0, *amaxes[:1])
            grad_weight = products.multiply(grad.transposed, x, weight_NK.dtype)
        return grad_x, grad_weight, None, None, None, None


def _gathered(x_TK: Tensor, group: Any) -> Tensor:
    gathered = x_TK.new_empty(group.size() * x_TK.shape[0], *x_TK.shape[1:])
    dist.all_gather_into_tensor(gathered, x_TK.contiguous(), group=group)
    return gathered
