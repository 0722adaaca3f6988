"""Fused residual, norm and modulation between two sub-layers, also of different layers; see `dit.kernels.modulation`.

                  y --+ bias, x gate
                      v
    x ----------------+---- x' ---------------------- x'  (residual)
                            '-- norm -- modulate ---- h   (input of the next sub-layer)

The forward pass saves x', y and 8 bytes per token; the backward pass recomputes the normalised values. The residual is
an output of the function, so that the same kernel adds its gradient.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from dit.kernels.fused import ops
from dit.kernels.fused.blocks import FORWARD_ROWS, blocks_of, blocks_of_passes
from dit.kernels.fused.operators import apply
from dit.kernels.modulation import NormModulation
from dit.kernels.recompute import recomputes
from dit.layout import SequenceLayout

WIDEST_WITH_BIAS = 4096
"""For wider inputs, the fourth sum of the backward kernel does not fit into registers."""


class _ResidualNorm(torch.autograd.Function):
    """x' and norm(x') weight (1 + scale) + shift."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Optional[Tensor],
        gate: Optional[Tensor],
        bias: Optional[Tensor],
        shift: Optional[Tensor],
        scale: Optional[Tensor],
        weight: Optional[Tensor],
        layout: SequenceLayout,
        eps: float,
        rms: bool,
    ) -> tuple[Tensor, Optional[Tensor]]:
        blocks, ctx.blocks = blocks_of_passes(layout, None if scale is None else x.shape[1])
        arguments = y, gate, bias, shift, scale, weight, blocks.table, blocks.offsets, eps, rms
        out, normed, statistics = ops.residual_norm(x, *arguments)
        if y is None:
            out = x
        ctx.residual = y is not None
        ctx.set_materialize_grads(False)
        for_gate = None if gate is None else y
        if scale is None:
            ctx.save_for_backward(None, for_gate, gate, bias, None, None, None)
            return out, None
        ctx.save_for_backward(out, for_gate, gate, bias, scale, weight, statistics)
        return out, normed

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_normed: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        x, y, gate, bias, scale, weight, statistics = ctx.saved_tensors
        if grad_out is not None:
            grad_out = grad_out.contiguous()
        if scale is not None:
            grad_normed = torch.zeros_like(x) if grad_normed is None else grad_normed.contiguous()
        elif gate is None and bias is None:
            return grad_out, grad_out, *[None] * 8
        modulation = gate, bias, scale, weight
        table = ctx.blocks.table, ctx.blocks.offsets
        grad_x, grad_y, sums = ops.residual_norm_backward(grad_normed, grad_out, x, y, *modulation, statistics, *table)
        grads = iter(ops.segment_sums(sums, *modulation, *table))
        grad_of_x = grad_out if scale is None else grad_x
        return (
            grad_of_x,
            (grad_of_x if gate is None else grad_y) if ctx.residual else None,
            *[None if x is None else next(grads) for x in (gate, bias, scale, scale, weight)],
            *(None, None, None),
        )


def _apply(
    x_TD: Tensor,
    y_TD: Optional[Tensor],
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    into: Optional[NormModulation],
    layout: SequenceLayout,
) -> tuple[Tensor, Tensor]:
    if bias_D is not None and y_TD is not None and bias_D.shape[0] > WIDEST_WITH_BIAS:
        y_TD, bias_D = y_TD + bias_D, None
    shift = scale = weight = None
    if into is not None:
        shift, scale, weight = into.shift_SD, into.scale_SD, into.weight_D
    norm = 0.0 if into is None else into.eps, weight is not None
    x_TD = x_TD.contiguous()
    y_TD = None if y_TD is None else y_TD.contiguous()
    out, normed = apply(_ResidualNorm, x_TD, y_TD, gate_SD, bias_D, shift, scale, weight, layout, *norm)
    if into is not None:
        recomputes(normed, _normed, out, shift, scale, weight, layout, *norm)
    return out, normed


def _normed(
    x: Tensor, shift: Tensor, scale: Tensor, weight: Optional[Tensor], layout: SequenceLayout, eps: float, rms: bool
) -> Tensor:
    blocks = blocks_of(layout, FORWARD_ROWS)
    return ops.residual_norm(x, None, None, None, shift, scale, weight, blocks.table, blocks.offsets, eps, rms)[1]


def norm_modulate(x_TD: Tensor, into: NormModulation, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """See `dit.kernels.modulation.norm_modulate`."""
    return _apply(x_TD, None, None, None, into, layout)


def residual(
    x_TD: Tensor, y_TD: Tensor, gate_SD: Optional[Tensor], bias_D: Optional[Tensor], layout: SequenceLayout
) -> Tensor:
    """See `dit.kernels.modulation.residual`."""
    return _apply(x_TD, y_TD, gate_SD, bias_D, None, layout)[0]


def residual_norm_modulate(
    x_TD: Tensor,
    y_TD: Tensor,
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    into: NormModulation,
    layout: SequenceLayout,
) -> tuple[Tensor, Tensor]:
    """See `dit.kernels.modulation.residual_norm_modulate`."""
    return _apply(x_TD, y_TD, gate_SD, bias_D, into, layout)
