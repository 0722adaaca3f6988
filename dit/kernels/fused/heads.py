"""Fused split into heads, QK norm and rotary positions; see `dit.kernels.rope.split_heads`.

Forward: values, and heads without norm or rotation, are views of the projection. Backward: one kernel writes the
gradient of the projection and sums the gradient of its bias.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from dit.kernels.fused import ops
from dit.kernels.fused.operators import apply
from dit.kernels.recompute import recomputes
from dit.kernels.rope import HeadNorm, Heads, Rotation


class _SplitHeads(torch.autograd.Function):
    """Queries, keys and values; parts that the projection does not have are empty tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_q: Optional[Tensor],
        weight_k: Optional[Tensor],
        bias: Optional[Tensor],
        groups: int,
        heads: Heads,
        eps: float,
        cos: Optional[Tensor],
        sin: Optional[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shape, x = x.shape, heads.grouped(x, groups)
        normed = weight_q is not None or weight_k is not None
        if normed or cos is not None:
            first_value = heads.queries + heads.keys
            x, v = x[:, :, :first_value], x[:, :, first_value:].flatten(1, 2)
            q, k = ops.heads(x, weight_q, weight_k, cos, sin, heads.keys, eps)
        else:
            q, k, v = heads.views(x)
        ctx.save_for_backward(x if normed else None, weight_q, weight_k, cos, sin)
        ctx.heads, ctx.groups, ctx.eps, ctx.bias = heads, groups, eps, bias is not None
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight_q, weight_k, cos, sin = ctx.saved_tensors
        heads: Heads = ctx.heads
        q, k, v = [
            None if not has else grad if grad.stride(-1) == 1 else grad.contiguous()
            for grad, has in zip(grads, heads.parts)
        ]
        grad_x, bias_sums, weight_sums = ops.heads_backward(
            *(q, k, v, x, weight_q, weight_k, cos, sin, ctx.groups, ctx.eps, ctx.bias)
        )
        grad_q = grad_k = grad_bias = None
        if x is not None:
            sums = ops.column_sums(weight_sums, (weight_k if weight_q is None else weight_q).dtype)
            parts = sums.view(heads.queries + heads.keys, -1)
            if heads.queries:
                grad_q = parts[0] if heads.queries == 1 else parts[: heads.queries].sum(0)
            if heads.keys:
                grad_k = parts[-1]
        if ctx.bias:
            grad_bias = ops.column_sums(bias_sums, grad_x.dtype)
        return grad_x.view(ctx.shape), grad_q, grad_k, grad_bias, *[None] * 5


def split_heads(
    x: Tensor,
    groups: int,
    heads: Heads,
    norm: Optional[HeadNorm] = None,
    rotation: Optional[Rotation] = None,
    bias: Optional[Tensor] = None,
) -> list[Tensor]:
    """See `dit.kernels.rope.split_heads`."""
    weights = (None, None) if norm is None else (norm.weight_q, norm.weight_k)
    angles = (None, None) if rotation is None else (rotation.cos_T1H, rotation.sin_T1H)
    eps = 0.0 if norm is None else norm.eps
    out = apply(_SplitHeads, x, *weights, bias, groups, heads, eps, *angles)
    if norm is not None or rotation is not None:
        if heads.queries:
            recomputes(out[0], _queries, x, groups, heads, *weights, *angles, eps)
        if heads.keys:
            recomputes(out[1], _keys, x, groups, heads, *weights, *angles, eps)
    return heads.present(out)


def _queries(x: Tensor, groups: int, heads: Heads, *arguments: Any) -> Tensor:
    q, k, cos, sin, eps = arguments
    return ops.heads(heads.grouped(x, groups)[:, :, : heads.queries], q, k, cos, sin, False, eps)[0]


def _keys(x: Tensor, groups: int, heads: Heads, *arguments: Any) -> Tensor:
    q, k, cos, sin, eps = arguments
    return ops.heads(heads.grouped(x, groups)[:, :, heads.queries : heads.queries + 1], q, k, cos, sin, True, eps)[1]
