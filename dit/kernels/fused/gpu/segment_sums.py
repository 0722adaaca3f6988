"""Triton kernel that sums the blocks of `residual_norm_backward_kernel` per segment, and those of all segments."""

import triton
import triton.language as tl

from dit.kernels.fused.blocks import cdiv
from dit.kernels.fused.gpu.residual_norm import ROWS_OF_TABLE, flags, stride

COLUMNS, BLOCKS = 64, 32
"""Columns of a program, and blocks that it loads at once."""


@triton.jit(do_not_specialize=["segments"])
def segment_sums_kernel(
    sums,
    offsets,
    table,
    gate,
    bias,
    scale,
    weight,
    grad_gate,
    grad_bias,
    grad_shift,
    grad_scale,
    grad_weight,
    gate_stride,
    scale_stride,
    size,
    segments,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Sum the blocks of one segment in the order of the table; the last program sums all blocks (bias, weight)."""
    segment = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    kinds = 2 * NORM + GATE + BIAS
    everything = segment == segments
    start = tl.load(offsets + tl.where(everything, 0, segment))
    stop = tl.load(offsets + tl.where(everything, segments, segment + 1))
    zeros = tl.zeros([BLOCKS, COLUMNS], tl.float32)
    sum_g, sum_gn, sum_dy, sum_d = zeros, zeros, zeros, zeros
    for block in range(start, stop, BLOCKS):
        blocks = block + tl.arange(0, BLOCKS)
        mask = (blocks < stop)[:, None] & inside[None, :]
        at = blocks.to(tl.int64)[:, None] * kinds * size + columns[None, :]
        owner = tl.load(table + blocks * ROWS_OF_TABLE + 2, mask=blocks < stop, other=0).to(tl.int64)[:, None]
        if NORM:
            of_block = tl.load(sums + at + size, mask=mask, other=0.0)
            if WEIGHT:
                row = owner * scale_stride + columns[None, :]
                factor = 1.0 + tl.load(scale + row, mask=mask & everything, other=0.0).to(tl.float32)
                of_block *= factor
            sum_gn += of_block
            sum_g += tl.load(sums + at, mask=mask, other=0.0)
        if GATE:
            sum_dy += tl.load(sums + at + 2 * NORM * size, mask=mask, other=0.0)
        if BIAS:
            of_block = tl.load(sums + at + (2 * NORM + GATE) * size, mask=mask, other=0.0)
            if GATE:
                row = owner * gate_stride + columns[None, :]
                factor = tl.load(gate + row, mask=mask & everything, other=0.0).to(tl.float32)
                of_block *= tl.where(everything, factor, 1.0)
            sum_d += of_block
    if everything:
        if BIAS:
            tl.store(grad_bias + columns, tl.sum(sum_d, 0).to(grad_bias.dtype.element_ty), mask=inside)
        if WEIGHT:
            tl.store(grad_weight + columns, tl.sum(sum_gn, 0).to(grad_weight.dtype.element_ty), mask=inside)
    else:
        at = segment.to(tl.int64) * size + columns
        if NORM:
            tl.store(grad_shift + at, tl.sum(sum_g, 0).to(grad_shift.dtype.element_ty), mask=inside)
            factor = tl.sum(sum_gn, 0)
            if WEIGHT:
                factor *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_scale + at, factor.to(grad_scale.dtype.element_ty), mask=inside)
        if GATE:
            total = tl.sum(sum_dy, 0)
            if BIAS:
                total += tl.sum(sum_d, 0) * tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_gate + at, total.to(grad_gate.dtype.element_ty), mask=inside)


def segment_sums(sums, gate_SD, bias_D, scale_SD, weight_D, table_B3, offsets_S, outputs):
    """Launch the sums kernel; `outputs` are the gradients of gate, bias, shift, scale and weight, if present."""
    grads = iter(outputs)
    all_grads = [None if x is None else next(grads) for x in (gate_SD, bias_D, scale_SD, scale_SD, weight_D)]
    size, segments = sums.shape[-1], len(offsets_S) - 1
    grid = segments + (bias_D is not None or weight_D is not None), cdiv(size, COLUMNS)
    segment_sums_kernel[grid](
        *(sums, offsets_S, table_B3, gate_SD, bias_D, scale_SD, weight_D, *all_grads),
        *map(stride, (gate_SD, scale_SD)),
        *(size, segments),
        **flags(gate_SD, bias_D, scale_SD, weight_D),
        COLUMNS=COLUMNS,
        BLOCKS=BLOCKS,
        num_warps=4,
    )
