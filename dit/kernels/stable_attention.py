"""Attention whose backward pass neither overflows nor underflows in half precision.

The gradient of the attention weights is divided by its largest absolute value, per sample and head, before the backward
pass of the softmax, and multiplied by it afterwards. Signature and padding as in `dit.kernels.attention`.

Source: NVIDIA NeMo's Imagen, option `stable_attention`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from dit.kernels.attention import attend_densely
from dit.layout import SequenceLayout

SMALLEST_SCALE = 1e-4
"""Smallest divisor of a gradient."""


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _StableAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(H)) v over `[B, N, n, H]`, with a rescaled backward pass."""

    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        half = q.shape[-1] ** -0.25  # scale both factors, so that the product stays in range
        q, k = q * half, k * half
        weights = torch.matmul(q, k.transpose(-1, -2)).float().softmax(-1).to(v.dtype)
        ctx.save_for_backward(q, k, v, weights)
        return torch.matmul(weights, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *grads: Any) -> tuple[Tensor, ...]:
        (grad_out,) = grads
        q, k, v, weights = ctx.saved_tensors
        half = q.shape[-1] ** -0.25
        grad_weights = torch.matmul(grad_out, v.transpose(-1, -2))
        largest = grad_weights.abs().amax((-2, -1), keepdim=True).clamp(min=SMALLEST_SCALE)
        grad_weights = (grad_weights / largest).float()
        weights32 = weights.float()
        grad_scores = weights32 * (grad_weights - (weights32 * grad_weights).sum(-1, keepdim=True))
        grad_scores = grad_scores.to(q.dtype)
        grad_q = torch.matmul(grad_scores, k) * half * largest
        grad_k = torch.matmul(grad_scores.transpose(-1, -2), q) * half * largest
        return grad_q, grad_k, torch.matmul(weights.transpose(-1, -2), grad_out)


def stable_attention(
    q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, layout_q: SequenceLayout, layout_k: SequenceLayout
) -> Tensor:
    """Attend inside segments, each group of equal length as one dense batch."""
    return attend_densely(_StableAttention.apply, q_TNH, k_KNH, v_KNH, layout_q, layout_k)
