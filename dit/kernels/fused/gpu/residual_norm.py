"""Triton kernels of residual + norm + modulation: rows of a segment per program, sums over its tokens in registers.

A program processes one block of the table of `dit.kernels.fused.blocks`. Its rows belong to one segment, so shift,
scale and gate are one row each, and the sums of their gradients stay in registers. All arithmetic is float32.

The width of a tile is a power of two, so a row is processed as two tiles:

    columns   0 ................. 1023 | 1024 .. 1151          tile a: WIDTH = 1024, tile b: REST = 128
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from dit.kernels.fused.blocks import cdiv

ROWS_OF_TABLE = tl.constexpr(3)
COLUMNS = 512
"""Columns of a program of the backward kernel without a norm, which needs no sum over a row."""
ROWS_IN_FLIGHT, SHARED_BYTES, OTHER_BYTES = 2, 192 * 1024, 1024
"""Rows that the backward kernel copies in advance, the shared memory of a program for them, and for sums over a row."""
WIDEST_COPIED = 6144
"""For wider rows, the modulation of the segment and the sums leave no registers for copies in advance."""


@triton.jit
def _load(at, columns, size):
    return tl.load(at + columns, mask=columns < size, other=0.0)


@triton.jit
def _store(at, columns, size, value):
    tl.store(at + columns, value.to(at.dtype.element_ty), mask=columns < size)


@triton.jit
def _factor(scale, weight, columns, size, WEIGHT: tl.constexpr):
    factor = 1.0 + _load(scale, columns, size).to(tl.float32)
    if WEIGHT:
        factor *= _load(weight, columns, size).to(tl.float32)
    return factor


@triton.jit
def _residual(
    x, y, gate_row, bias_row, out, columns, size, RESIDUAL: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr
):
    """Store a tile of x' = x + gate (y + bias), and return the stored values."""
    value = _load(x, columns, size).to(tl.float32)
    if RESIDUAL:
        added = _load(y, columns, size).to(tl.float32)
        if BIAS:
            added += bias_row
        if GATE:
            added *= gate_row
        stored = (value + added).to(out.dtype.element_ty)
        _store(out, columns, size, stored)
        value = stored.to(tl.float32)
    return value


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
    statistics,
    table,
    gate_stride,
    shift_stride,
    scale_stride,
    size,
    eps,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
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
    a = tl.arange(0, WIDTH)
    if REST:
        b = WIDTH + tl.arange(0, REST)
    gate_a, gate_b, bias_a, bias_b = 0.0, 0.0, 0.0, 0.0
    if GATE:
        gate_a = _load(gate + segment * gate_stride, a, size).to(tl.float32)
        if REST:
            gate_b = _load(gate + segment * gate_stride, b, size).to(tl.float32)
    if BIAS:
        bias_a = _load(bias, a, size).to(tl.float32)
        if REST:
            bias_b = _load(bias, b, size).to(tl.float32)
    if NORM:
        shift_a = _load(shift + segment * shift_stride, a, size).to(tl.float32)
        factor_a = _factor(scale + segment * scale_stride, weight, a, size, WEIGHT)
        if REST:
            shift_b = _load(shift + segment * shift_stride, b, size).to(tl.float32)
            factor_b = _factor(scale + segment * scale_stride, weight, b, size, WEIGHT)
    for i in range(rows):
        row = (first + i).to(tl.int64)
        at = row * size
        value_a = _residual(x + at, y + at if RESIDUAL else y, gate_a, bias_a, out + at, a, size, RESIDUAL, GATE, BIAS)
        if REST:
            value_b = _residual(
                x + at, y + at if RESIDUAL else y, gate_b, bias_b, out + at, b, size, RESIDUAL, GATE, BIAS
            )
        if NORM:
            if not RMS:
                average = tl.sum(value_a, 0)
                if REST:
                    average += tl.sum(value_b, 0)
                average /= size
                tl.store(statistics + row * 2 + 1, average)
                value_a = tl.where(a < size, value_a - average, 0.0)
                if REST:
                    value_b = tl.where(b < size, value_b - average, 0.0)
            square = tl.sum(value_a * value_a, 0)
            if REST:
                square += tl.sum(value_b * value_b, 0)
            inverse = 1.0 / tl.sqrt(square / size + eps)
            tl.store(statistics + row * (2 - RMS), inverse)
            _store(normed + at, a, size, value_a * inverse * factor_a + shift_a)
            if REST:
                _store(normed + at, b, size, value_b * inverse * factor_b + shift_b)


@triton.jit
def _normed_and_products(
    x, grad_normed, scale_row, weight_row, average, inverse, columns, size, RMS: tl.constexpr, WEIGHT: tl.constexpr
):
    """Return a tile of the normalised tokens n, of the gradient g of the modulated tokens, and of that of n."""
    normed = _load(x, columns, size).to(tl.float32)
    if not RMS:
        normed -= average
    normed *= inverse  # values outside are arbitrary, because their gradient is 0
    g = _load(grad_normed, columns, size).to(tl.float32)
    factor = 1.0 + scale_row.to(tl.float32)
    if WEIGHT:
        factor *= weight_row.to(tl.float32)
    return normed, g, g * factor


@triton.jit
def _finish_tile(
    grad,
    grad_out,
    y,
    gate_row,
    grad_x,
    grad_y,
    columns,
    size,
    sum_dy,
    sum_d,
    PASSED: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Add the gradient of x', store the gradients of x and y, and return the sums for gate and bias with this row."""
    if PASSED:
        grad += _load(grad_out, columns, size).to(tl.float32)
    if NORM:
        _store(grad_x, columns, size, grad)
    if GATE:
        sum_dy += grad * _load(y, columns, size).to(tl.float32)
    if BIAS:
        sum_d += grad
    if GATE:
        _store(grad_y, columns, size, grad * gate_row.to(tl.float32))
    return sum_dy, sum_d


@triton.jit
def _store_sums(
    into, columns, size, sum_g, sum_gn, sum_dy, sum_d, GATE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr
):
    if NORM:
        _store(into, columns, size, sum_g)
        _store(into + size, columns, size, sum_gn)
        into += 2 * size
    if GATE:
        _store(into, columns, size, sum_dy)
        into += size
    if BIAS:
        _store(into, columns, size, sum_d)


@triton.jit
def residual_norm_backward_kernel(
    grad_normed,
    grad_out,
    x,
    y,
    gate,
    scale,
    weight,
    statistics,
    grad_x,
    grad_y,
    sums,
    table,
    gate_stride,
    scale_stride,
    size,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
    PASSED: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Compute the gradients of the tokens, and up to four sums over the rows of the block.

    With n the normalised tokens, g the gradient of the modulated tokens and d the gradient of the residual, the sums
    are of g, of g n, of d y, and of d. While a row is processed, the next STAGES - 1 rows are copied to shared memory.
    Without a norm, the columns are split over programs, too.
    """
    block = tl.program_id(0)
    entry = table + block * ROWS_OF_TABLE
    first, rows, segment = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2).to(tl.int64)
    a = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    zeros_a = tl.zeros([WIDTH], tl.float32)
    g_a, gn_a, dy_a, d_a = zeros_a, zeros_a, zeros_a, zeros_a
    gate_a, scale_a, weight_a, average, inverse = 0.0, 0.0, 0.0, 0.0, 0.0
    if REST:
        b = WIDTH + tl.arange(0, REST)
        zeros_b = tl.zeros([REST], tl.float32)
        g_b, gn_b, dy_b, d_b = zeros_b, zeros_b, zeros_b, zeros_b
        gate_b, scale_b, weight_b = 0.0, 0.0, 0.0
    # Rows of modulations are the same for every token of the block; they stay in registers in their dtype.
    if GATE:
        gate_a = _load(gate + segment * gate_stride, a, size)
        if REST:
            gate_b = _load(gate + segment * gate_stride, b, size)
    if NORM:
        scale_a = _load(scale + segment * scale_stride, a, size)
        if REST:
            scale_b = _load(scale + segment * scale_stride, b, size)
        if WEIGHT:
            weight_a = _load(weight, a, size)
            if REST:
                weight_b = _load(weight, b, size)
    for i in tl.range(0, rows, num_stages=STAGES):
        at = (first + i).to(tl.int64) * size
        gate_row, scale_row, weight_row = gate_a, scale_a, weight_a
        if STAGES == 1:  # the cache holds these rows, so that registers are free; `REST` is 0
            if GATE:
                gate_row = _load(gate + segment * gate_stride, a, size)
            if NORM:
                scale_row = _load(scale + segment * scale_stride, a, size)
                if WEIGHT:
                    weight_row = _load(weight, a, size)
        grad_a = zeros_a
        if REST:
            grad_b = zeros_b
        if NORM:
            inverse = tl.load(statistics + (first + i) * (2 - RMS))
            if not RMS:
                average = tl.load(statistics + (first + i) * 2 + 1)
            normed_a, g, grad_a = _normed_and_products(
                x + at, grad_normed + at, scale_row, weight_row, average, inverse, a, size, RMS, WEIGHT
            )
            g_a += g
            gn_a += g * normed_a
            along, total = tl.sum(grad_a * normed_a, 0), 0.0
            if not RMS:
                total = tl.sum(grad_a, 0)
            if REST:
                normed_b, g, grad_b = _normed_and_products(
                    x + at, grad_normed + at, scale_b, weight_b, average, inverse, b, size, RMS, WEIGHT
                )
                g_b += g
                gn_b += g * normed_b
                along += tl.sum(grad_b * normed_b, 0)
                if not RMS:
                    total += tl.sum(grad_b, 0)
            grad_a = (grad_a - total / size - normed_a * (along / size)) * inverse
            if REST:
                grad_b = (grad_b - total / size - normed_b * (along / size)) * inverse
        passed = grad_out + at if PASSED else grad_out
        gated, to_x, to_y = (y + at if GATE else y), grad_x + at, grad_y + at
        dy_a, d_a = _finish_tile(
            grad_a, passed, gated, gate_row, to_x, to_y, a, size, dy_a, d_a, PASSED, GATE, BIAS, NORM
        )
        if REST:
            dy_b, d_b = _finish_tile(
                grad_b, passed, gated, gate_b, to_x, to_y, b, size, dy_b, d_b, PASSED, GATE, BIAS, NORM
            )
    into = sums + block.to(tl.int64) * (2 * NORM + GATE + BIAS) * size
    _store_sums(into, a, size, g_a, gn_a, dy_a, d_a, GATE, BIAS, NORM)
    if REST:
        _store_sums(into, b, size, g_b, gn_b, dy_b, d_b, GATE, BIAS, NORM)


def tiles(size: int) -> tuple[int, int]:
    """Split a row into two tiles, because the width of a tile is a power of two: 1152 = 1024 + 128.

    Returns:
        Widths of both tiles; 0 for no second tile. Less than half of a tile is masked.
    """
    first = 1 << (size.bit_length() - 1)
    rest = triton.next_power_of_2(size - first) if size > first else 0
    return (2 * first, 0) if rest == first else (first, rest)


def warps(width: int, rest: int) -> int:
    """Return the warps of a program with one row in registers: 8 elements of the first tile per thread.

    If threads would then have one element of the second tile, they get 16: copies to shared memory have at least 4
    bytes per thread.
    """
    return min(max(width // (512 if 0 < rest < width // 4 else 256), 1), 16)


def stages(width: int, element_bytes: int, shared: int = SHARED_BYTES) -> int:
    """Return 1 + the rows that a program copies to shared memory in advance: two, or fewer if they do not fit.

    Args:
        element_bytes: bytes of one element of all tensors that are read.
        shared: result of `shared_bytes`.
    """
    return 1 if width > WIDEST_COPIED else 1 + min(shared // (width * element_bytes), ROWS_IN_FLIGHT)


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory for copies of a program: 192 KiB on H100, 162 KiB on A100, 98 KiB on GeForce GPUs."""
    if device.type != "cuda":
        return SHARED_BYTES
    limit: int = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return min(limit - OTHER_BYTES, SHARED_BYTES)


def residual_norm(x_TD, y_TD, gate_SD, bias_D, shift_SD, scale_SD, weight_D, table_B3, offsets_S, eps, rms, outputs):
    """Launch the forward kernel; `outputs` are the residual, the modulated tokens and the statistics."""
    width, rest = tiles(x_TD.shape[1])
    residual_norm_kernel[(len(table_B3),)](
        *(x_TD, y_TD, gate_SD, bias_D, shift_SD, scale_SD, weight_D, *outputs, table_B3),
        *map(stride, (gate_SD, shift_SD, scale_SD)),
        *(x_TD.shape[1], eps),
        **flags(gate_SD, bias_D, scale_SD, weight_D),
        WIDTH=width,
        REST=rest,
        RESIDUAL=y_TD is not None,
        RMS=rms,
        num_warps=warps(width, rest),
    )


def residual_norm_backward(
    grad_normed, grad_out, x_TD, y_TD, gate_SD, bias_D, scale_SD, weight_D, statistics, table_B3, offsets_S, outputs
):
    """Launch the backward kernel; `outputs` are the gradients of x and y and the sums of the blocks."""
    size = outputs[2].shape[2]
    if scale_SD is None:
        grid, width, rest = (len(table_B3), cdiv(size, COLUMNS)), COLUMNS, 0
    else:
        grid, (width, rest) = (len(table_B3), 1), tiles(size)
    tokens = [x for x in (grad_normed, grad_out, x_TD, y_TD) if x is not None]
    residual_norm_backward_kernel[grid](
        *(grad_normed, grad_out, x_TD, y_TD, gate_SD, scale_SD, weight_D, statistics, *outputs, table_B3),
        *map(stride, (gate_SD, scale_SD)),
        size,
        **flags(gate_SD, bias_D, scale_SD, weight_D),
        WIDTH=width,
        REST=rest,
        STAGES=stages(width + rest, sum(x.element_size() for x in tokens), shared_bytes(outputs[2].device)),
        PASSED=grad_out is not None,
        RMS=statistics is not None and statistics.shape[1] == 1,
        num_warps=warps(width, rest),
    )


def flags(gate, bias, scale, weight):
    """Return the flags of the parts of a kernel that a call uses."""
    return {
        "GATE": gate is not None,
        "BIAS": bias is not None,
        "NORM": scale is not None,
        "WEIGHT": weight is not None,
    }


def stride(x_SD):
    """Return the row stride of a modulation, which may be None or a slice of a wider tensor."""
    if x_SD is None:
        return 0
    assert x_SD.stride(1) == 1, "the features of a modulation must be contiguous"
    return x_SD.stride(0)
