"""Fused group norm with scale, shift and SiLU on channels-last pictures; see `dit.kernels.group_norm`.

Forward and backward read x twice each. The forward pass saves x and four numbers per channel; the backward pass
recomputes the normalised values.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from dit.kernels.fused import ops, picture_ops
from dit.kernels.fused.blocks import rows_of_pictures
from dit.kernels.group_norm import Groups


class _NormGroups(torch.autograd.Function):
    """Group norm of pictures `[N, P, C]`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        scale: Optional[Tensor],
        shift: Optional[Tensor],
        groups: int,
        eps: float,
        activate: bool,
    ) -> Tensor:
        pictures, positions, _ = x.shape
        rows = rows_of_pictures(positions)
        sums = picture_ops.group_sums(x, rows)
        sizes = pictures, positions, groups, rows, eps
        factors = picture_ops.group_factors(sums, weight, bias, scale, shift, *sizes)
        ctx.save_for_backward(x, weight, bias, scale, factors)
        ctx.groups, ctx.rows, ctx.activate = groups, rows, activate
        return picture_ops.norm_groups(x, factors, rows, activate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight, bias, scale, factors = ctx.saved_tensors
        grad, rows, activate = grad.contiguous(), ctx.rows, ctx.activate
        sums = picture_ops.group_gradient_sums(grad, x, factors, rows, activate)
        dtype = x.dtype if scale is None else scale.dtype
        rest, grad_scale, grad_shift, grad_weights = picture_ops.group_gradients(
            sums, factors, weight, bias, scale, x.shape[1], ctx.groups, dtype
        )
        grad_x = picture_ops.norm_groups_backward(grad, x, factors, rest, rows, activate)
        grad_weight, grad_bias = ops.column_sums(grad_weights.flatten(1), weight.dtype).chunk(2)
        grad_modulation = (None, None) if scale is None else (grad_scale, grad_shift)
        return grad_x, grad_weight, grad_bias, *grad_modulation, None, None, None


def norm_groups(
    x_NCHW: Tensor,
    groups: Groups,
    scale_NC: Optional[Tensor] = None,
    shift_NC: Optional[Tensor] = None,
    *,
    activate: bool = False,
) -> Tensor:
    """See `dit.kernels.group_norm.norm_groups`; pictures that are not channels-last are copied."""
    pictures, channels, height, width = x_NCHW.shape
    x_NPC = x_NCHW.permute(0, 2, 3, 1).contiguous().view(pictures, height * width, channels)
    arguments = groups.weight, groups.bias, scale_NC, shift_NC, groups.count, groups.eps, activate
    return _NormGroups.apply(x_NPC, *arguments).view(pictures, height, width, channels).permute(0, 3, 1, 2)
