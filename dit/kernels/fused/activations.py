"""Fused GELU, SwiGLU and GeGLU with the bias of the linear before them; see `dit.kernels.modulation`."""

from typing import Any, Optional

import torch
from torch import Tensor

from dit.kernels.fused import ops
from dit.kernels.fused.operators import apply
from dit.kernels.recompute import recomputes


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Optional[Tensor], gate: int) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.gate = gate
        return ops.activation(x, bias, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, bias = ctx.saved_tensors
        grad_x, sums = ops.activation_backward(grad.contiguous(), x, bias, ctx.gate)
        return grad_x, None if bias is None else ops.column_sums(sums, bias.dtype), None


def _apply(x: Tensor, bias_F: Optional[Tensor], gate: int) -> Tensor:
    if x.dim() != 2:
        return _apply(x.flatten(0, -2), bias_F, gate).unflatten(0, x.shape[:-1])
    x_TF = x.contiguous()
    out_TF: Tensor = apply(_Activation, x_TF, bias_F, gate)
    recomputes(out_TF, ops.activation, x_TF, bias_F, gate)
    return out_TF


def gelu_tanh(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """See `dit.kernels.modulation.gelu_tanh`."""
    return _apply(x_TF, bias_F, 0)


def swiglu(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """See `dit.kernels.modulation.swiglu`."""
    return _apply(x_TF, bias_F, ops.SILU)


def geglu_tanh(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """See `dit.kernels.modulation.geglu_tanh`."""
    return _apply(x_TF, bias_F, ops.GELU)
