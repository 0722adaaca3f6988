"""Triton kernels of residual + norm + modulation: rows of a segment per program, sums over its tokens in registers.

A program processes one block of the table of `dit.kernels.fused.blocks`. Its rows belong to one segment, so shift,
scale and gate are one row each, and the sums of their gradients stay in registers. All arithmetic is float32.
"""

from typing import Any, Optional

import triton
import triton.language as tl
from torch import Tensor

from dit.kernels.fused.blocks import Blocks, cdiv

ROWS_OF_TABLE = tl.constexpr(3)
SUM_COLUMNS, SUM_BLOCKS = 64, 32
"""Columns of a program of the sums kernel, and blocks that it loads at once."""


@triton.jit
def residual_norm_kernel(
    x,
    y,
    gate,
    bias,
    shift,
    scale,
    weight,
    out,
    normed,
    mean,
    rstd,
    table,
    gate_stride,
    shift_stride,
    scale_stride,
    size,
    eps,
    WIDTH: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Compute x' = x + gate (y + bias), and norm(x') weight (1 + scale) + shift of the stored x'."""
    entry = table + tl.program_id(0) * ROWS_OF_TABLE
    first, rows, segment = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < size
    if GATE:
        gate_row = tl.load(gate + segment * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias_row = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        shift_row = tl.load(shift + segment * shift_stride + columns, mask=inside, other=0.0).to(tl.float32)
        factor = 1.0 + tl.load(scale + segment * scale_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            factor *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    for i in range(rows):
        row = (first + i).to(tl.int64)
        at = row * size + columns
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            added = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
            if BIAS:
                added += bias_row
            if GATE:
                added *= gate_row
            stored = (value + added).to(out.dtype.element_ty)
            tl.store(out + at, stored, mask=inside)
            value = stored.to(tl.float32)
        if NORM:
            if not RMS:
                average = tl.sum(value, 0) / size
                tl.store(mean + row, average)
                value = tl.where(inside, value - average, 0.0)
            inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
            tl.store(rstd + row, inverse)
            modulated = value * inverse * factor + shift_row
            tl.store(normed + at, modulated.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def residual_norm_backward_kernel(
    grad_normed,
    grad_out,
    x,
    y,
    gate,
    scale,
    weight,
    mean,
    rstd,
    grad_x,
    grad_y,
    sums,
    table,
    gate_stride,
    scale_stride,
    size,
    WIDTH: tl.constexpr,
    PASSED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Compute the gradients of the tokens, and up to four sums over the rows of the block.

    With n the normalised tokens, g the gradient of the modulated tokens and d the gradient of the residual, the sums
    are of g, of g n, of d y, and of d.
    """
    block = tl.program_id(0)
    entry = table + block * ROWS_OF_TABLE
    first, rows, segment = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < size
    zeros = tl.zeros([WIDTH], tl.float32)
    sum_g, sum_gn, sum_dy, sum_d = zeros, zeros, zeros, zeros
    for i in range(rows):
        row = (first + i).to(tl.int64)
        at = row * size
        grad = zeros
        if NORM:
            normed = tl.load(x + at + columns, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(rstd + row)
            if not RMS:
                normed -= tl.load(mean + row)
            normed *= inverse  # values outside are arbitrary, because their gradient is 0
            g = tl.load(grad_normed + at + columns, mask=inside, other=0.0).to(tl.float32)
            sum_g += g
            sum_gn += g * normed
            # The row is the same for every token of the block; the cache holds it, so that registers are free.
            factor = 1.0 + tl.load(scale + segment * scale_stride + columns, mask=inside, other=0.0).to(tl.float32)
            if WEIGHT:
                factor *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
            g *= factor
            along = tl.sum(g * normed, 0) / size
            grad = (g - normed * along) * inverse if RMS else (g - tl.sum(g, 0) / size - normed * along) * inverse
        if PASSED:
            grad += tl.load(grad_out + at + columns, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            tl.store(grad_x + at + columns, grad.to(grad_x.dtype.element_ty), mask=inside)
        if RESIDUAL:
            if GATE:
                added = tl.load(y + at + columns, mask=inside, other=0.0).to(tl.float32)
                sum_dy += grad * added
            if BIAS:
                sum_d += grad
            if GATE:
                grad *= tl.load(gate + segment * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
                tl.store(grad_y + at + columns, grad.to(grad_y.dtype.element_ty), mask=inside)
    into = sums + block.to(tl.int64) * (2 * NORM + GATE + BIAS) * size + columns
    if NORM:
        tl.store(into, sum_g, mask=inside)
        tl.store(into + size, sum_gn, mask=inside)
        into += 2 * size
    if GATE:
        tl.store(into, sum_dy, mask=inside)
        into += size
    if BIAS:
        tl.store(into, sum_d, mask=inside)


@triton.jit
def segment_sums_kernel(
    sums,
    offsets,
    table,
    gate,
    bias,
    scale,
    weight,
    grad_shift,
    grad_scale,
    grad_gate,
    grad_bias,
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


def warps(width: int) -> int:
    """Return the warps of a program with one row in registers: 16 elements per thread, up to 8192 columns."""
    return min(max(width // 512, 1), 16)


def residual_norm(
    x_TD: Tensor,
    y_TD: Optional[Tensor],
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    shift_SD: Optional[Tensor],
    scale_SD: Optional[Tensor],
    weight_D: Optional[Tensor],
    blocks: Blocks,
    eps: float,
    rms: bool,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Launch the forward kernel; `outputs` are the residual, the modulated tokens, mean and 1 / std of each token."""
    width = triton.next_power_of_2(x_TD.shape[1])
    residual_norm_kernel[(len(blocks.table),)](
        *(x_TD, y_TD, gate_SD, bias_D, shift_SD, scale_SD, weight_D, *outputs, blocks.table),
        *map(_stride, (gate_SD, shift_SD, scale_SD)),
        *(x_TD.shape[1], eps),
        **_flags(y_TD, gate_SD, bias_D, scale_SD, weight_D),
        WIDTH=width,
        RMS=rms,
        num_warps=warps(width),
    )


def residual_norm_backward(
    grad_normed: Optional[Tensor],
    grad_out: Optional[Tensor],
    x_TD: Optional[Tensor],
    y_TD: Optional[Tensor],
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    scale_SD: Optional[Tensor],
    weight_D: Optional[Tensor],
    mean: Optional[Tensor],
    rstd: Optional[Tensor],
    blocks: Blocks,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Launch the backward kernel; `outputs` are the gradients of x and y and the sums of the blocks."""
    size = outputs[2].shape[2]
    width = triton.next_power_of_2(size)
    residual_norm_backward_kernel[(len(blocks.table),)](
        *(grad_normed, grad_out, x_TD, y_TD, gate_SD, scale_SD, weight_D, mean, rstd, *outputs, blocks.table),
        *map(_stride, (gate_SD, scale_SD)),
        size,
        **_flags(gate_SD if bias_D is None else bias_D, gate_SD, bias_D, scale_SD, weight_D),
        WIDTH=width,
        PASSED=grad_out is not None,
        RMS=mean is None,
        num_warps=warps(width),
    )


def segment_sums(
    sums: Tensor,
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    scale_SD: Optional[Tensor],
    weight_D: Optional[Tensor],
    blocks: Blocks,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Launch the sums kernel; `outputs` are the gradients of shift, scale, gate, bias and weight."""
    size, segments = sums.shape[-1], len(blocks.offsets) - 1
    flags = _flags(None, gate_SD, bias_D, scale_SD, weight_D)
    del flags["RESIDUAL"]
    grid = segments + (bias_D is not None or weight_D is not None), cdiv(size, SUM_COLUMNS)
    segment_sums_kernel[grid](
        *(sums, blocks.offsets, blocks.table, gate_SD, bias_D, scale_SD, weight_D, *outputs),
        *map(_stride, (gate_SD, scale_SD)),
        *(size, segments),
        **flags,
        COLUMNS=SUM_COLUMNS,
        BLOCKS=SUM_BLOCKS,
        num_warps=4,
    )


def _flags(y: Any, gate: Any, bias: Any, scale: Any, weight: Any) -> dict[str, Any]:
    """Return the flags of the parts of a kernel that a call uses."""
    return {
        "RESIDUAL": y is not None,
        "GATE": gate is not None,
        "BIAS": bias is not None,
        "NORM": scale is not None,
        "WEIGHT": weight is not None,
    }


def _stride(x_SD: Optional[Tensor]) -> int:
    """Return the row stride of a modulation, which may be a slice of a wider tensor."""
    if x_SD is None:
        return 0
    assert x_SD.stride(1) == 1, "the features of a modulation must be contiguous"
    return x_SD.stride(0)
