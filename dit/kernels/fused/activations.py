"""Fused GELU and SwiGLU with the bias of the linear before them; see `dit.kernels.modulation`."""

from typing import Any, Optional

import torch
from torch import Tensor

from dit.kernels.fused import ops
from dit.kernels.recompute import recomputes


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Optional[Tensor], gated: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.gated = gated
        return ops.activation(x, bias, gated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, bias = ctx.saved_tensors
        grad_x, sums = ops.activation_backward(grad.contiguous(), x, bias, ctx.gated)
        return grad_x, None if bias is None else ops.column_sums(sums, bias.dtype), None


def _apply(x: Tensor, bias_F: Optional[Tensor], gated: bool) -> Tensor:
    x_TF = x.contiguous().view(-1, x.shape[-1])
    out_TF = _Activation.apply(x_TF, bias_F, gated)
    recomputes(out_TF, ops.activation, x_TF, bias_F, gated)
    return out_TF.view(*x.shape[:-1], -1)


def gelu_tanh(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """See `dit.kernels.modulation.gelu_tanh`."""
    return _apply(x_TF, bias_F, False)


def swiglu(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """See `dit.kernels.modulation.swiglu`."""
    return _apply(x_TF, bias_F, True)
