"""Triton kernels of a group norm with scale, shift and SiLU on channels-last pictures `[N, P, C]` with P positions.

Groups span channels and positions, so forward and backward need two passes each: one sums each channel over blocks of
positions, the other computes the result. Between the passes there are a few numbers per channel and picture:

    forward     x --> sums of blocks --> mean, factor, offset, 1 / std;  y = act((x - mean) factor + offset)
    backward    x, dy --> sums of blocks --> along, across;  dx = factor dh - along - (x - mean) across

with dh the gradient before the activation. Sums are float32 in a fixed order. Squares are of the distance from one
value of the channel, which avoids cancellation if the mean is large.
"""

import triton
import triton.language as tl

from dit.kernels.fused.blocks import cdiv
from dit.kernels.fused.gpu.residual_norm import stride

TILE = 2048
"""Elements that a program has in registers at once."""
BLOCKS = 16
"""Blocks of sums that a program reads at once."""
SIZES = ["positions", "rows", "blocks"]
"""Numbers that differ between pictures; a kernel is compiled once for all of them."""


@triton.jit
def _block(positions, channels, rows, blocks):
    """Return the picture of a program, the number of positions of its block, and the offset of the first one."""
    picture, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * rows
    return picture, tl.minimum(rows, positions - first), (picture * positions + first) * channels


@triton.jit
def _load_factors(at, channels, inside):
    """Return mean, factor and offset of each channel of a picture."""
    mean, factor = tl.load(at, mask=inside, other=0.0), tl.load(at + channels, mask=inside, other=0.0)
    return mean, factor, tl.load(at + 2 * channels, mask=inside, other=0.0)


@triton.jit(do_not_specialize=SIZES)
def group_sums_kernel(x, sums, positions, channels, rows, blocks, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write each channel's mean and sum of squared deviations over a block of positions of one picture."""
    _, count, base = _block(positions, channels, rows, blocks)
    columns = tl.arange(0, WIDTH)[None, :]
    inside = columns < channels
    at = x + base
    origin = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    total, squares = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < count) & inside
        value = tl.load(at + row * channels + columns, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - origin, 0.0)
        total += value
        squares += value * value
    distance = tl.sum(total, 0)[None, :] / count
    into = sums + tl.program_id(0).to(tl.int64) * 2 * channels + columns
    tl.store(into, origin + distance, mask=inside)
    tl.store(into + channels, tl.sum(squares, 0)[None, :] - distance * distance * count, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def group_factors_kernel(
    sums,
    weight,
    bias,
    scale,
    shift,
    factors,
    scale_stride,
    shift_stride,
    positions,
    channels,
    groups,
    rows,
    blocks,
    eps,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write mean, factor, offset and 1 / std of each channel of one group of one picture."""
    picture, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    size = channels // groups
    member = tl.arange(0, WIDTH)[None, :]
    inside = member < size
    channel = group * size + member
    at = sums + picture.to(tl.int64) * blocks * 2 * channels + channel
    total = tl.zeros([BLOCKS, WIDTH], tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        mask = (block < blocks) & inside
        count = tl.minimum(rows, positions - block * rows)
        total += tl.load(at + block * 2 * channels, mask=mask, other=0.0) * tl.where(mask, count, 0)
    numbers = positions * (1.0 * size)  # may exceed 32 bits
    mean = tl.sum(tl.sum(total, 0), 0) / numbers
    total = tl.zeros([BLOCKS, WIDTH], tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        mask = (block < blocks) & inside
        count = tl.minimum(rows, positions - block * rows)
        distance = tl.load(at + block * 2 * channels, mask=mask, other=0.0) - mean
        squares = tl.load(at + block * 2 * channels + channels, mask=mask, other=0.0)
        total += tl.where(mask, squares + distance * distance * count, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(total, 0), 0) / numbers + eps)
    factor = inverse * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        more = 1.0 + tl.load(scale + picture * scale_stride + channel, mask=inside, other=0.0).to(tl.float32)
        factor *= more
        added = tl.load(shift + picture * shift_stride + channel, mask=inside, other=0.0).to(tl.float32)
        offset = offset * more + added
    into = factors + picture.to(tl.int64) * 4 * channels + channel
    tl.store(into, tl.zeros([1, WIDTH], tl.float32) + mean, mask=inside)
    tl.store(into + channels, factor, mask=inside)
    tl.store(into + 2 * channels, offset, mask=inside)
    tl.store(into + 3 * channels, tl.zeros([1, WIDTH], tl.float32) + inverse, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def norm_groups_kernel(
    x, factors, out, positions, channels, rows, blocks, ACTIVATE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Compute the output for a block of positions of one picture."""
    picture, count, base = _block(positions, channels, rows, blocks)
    columns = tl.arange(0, WIDTH)[None, :]
    inside = columns < channels
    of_picture = factors + picture * 4 * channels + columns
    mean, factor, offset = _load_factors(of_picture, channels, inside)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < count) & inside
        value = tl.load(x + base + row * channels + columns, mask=mask, other=0.0).to(tl.float32)
        value = (value - mean) * factor + offset
        if ACTIVATE:
            value *= tl.sigmoid(value)
        tl.store(out + base + row * channels + columns, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _before_activation(dy, distance, factor, offset, ACTIVATE: tl.constexpr):
    if ACTIVATE:
        value = distance * factor + offset
        dy *= tl.sigmoid(value) * (1.0 + value * tl.sigmoid(-value))
    return dy


@triton.jit(do_not_specialize=SIZES)
def group_gradient_sums_kernel(
    grad,
    x,
    factors,
    sums,
    positions,
    channels,
    rows,
    blocks,
    ACTIVATE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write each channel's sums of dh and of dh times the normalised value over a block of positions."""
    picture, count, base = _block(positions, channels, rows, blocks)
    columns = tl.arange(0, WIDTH)[None, :]
    inside = columns < channels
    of_picture = factors + picture * 4 * channels + columns
    mean, factor, offset = _load_factors(of_picture, channels, inside)
    total, along = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < count) & inside
        at = base + row * channels + columns
        distance = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        dy = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        dy = _before_activation(dy, distance, factor, offset, ACTIVATE)
        total += dy
        along += dy * distance
    inverse = tl.load(of_picture + 3 * channels, mask=inside, other=0.0)
    into = sums + tl.program_id(0).to(tl.int64) * 2 * channels + columns
    tl.store(into, tl.sum(total, 0)[None, :], mask=inside)
    tl.store(into + channels, tl.sum(along, 0)[None, :] * inverse, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def group_gradients_kernel(
    sums,
    factors,
    weight,
    bias,
    scale,
    rest,
    grad_scale,
    grad_shift,
    grad_weights,
    scale_stride,
    positions,
    channels,
    groups,
    blocks,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Sum the blocks of one group of one picture: terms of the second pass, and gradients of the parameters."""
    picture, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    size = channels // groups
    member = tl.arange(0, WIDTH)
    inside = member < size
    channel = group * size + member
    at = sums + picture.to(tl.int64) * blocks * 2 * channels + channel[None, :]
    total, along = tl.zeros([BLOCKS, WIDTH], tl.float32), tl.zeros([BLOCKS, WIDTH], tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        mask = (block < blocks) & inside[None, :]
        total += tl.load(at + block * 2 * channels, mask=mask, other=0.0)
        along += tl.load(at + block * 2 * channels + channels, mask=mask, other=0.0)
    of_shift, of_normed = tl.sum(total, 0), tl.sum(along, 0)
    into = picture.to(tl.int64) * channels + channel
    if SCALE:
        w = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_shift + into, of_shift.to(grad_shift.dtype.element_ty), mask=inside)
        tl.store(grad_scale + into, (w * of_normed + b * of_shift).to(grad_scale.dtype.element_ty), mask=inside)
        more = 1.0 + tl.load(scale + picture * scale_stride + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        more = 1.0
    into = grad_weights + picture.to(tl.int64) * 2 * channels + channel
    tl.store(into, of_normed * more, mask=inside)
    tl.store(into + channels, of_shift * more, mask=inside)
    of_picture = factors + picture.to(tl.int64) * 4 * channels + channel
    factor = tl.load(of_picture + channels, mask=inside, other=0.0)
    inverse = tl.load(of_picture + 3 * channels, mask=inside, other=0.0)
    numbers = positions * (1.0 * size)  # may exceed 32 bits
    into = rest + picture.to(tl.int64) * 2 * channels + channel
    tl.store(into, tl.zeros([WIDTH], tl.float32) + tl.sum(factor * of_shift, 0) / numbers, mask=inside)
    tl.store(into + channels, tl.sum(factor * of_normed, 0) / numbers * inverse, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def norm_groups_backward_kernel(
    grad,
    x,
    factors,
    rest,
    grad_x,
    positions,
    channels,
    rows,
    blocks,
    ACTIVATE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the gradient of x for a block of positions of one picture."""
    picture, count, base = _block(positions, channels, rows, blocks)
    columns = tl.arange(0, WIDTH)[None, :]
    inside = columns < channels
    of_picture = factors + picture * 4 * channels + columns
    mean, factor, offset = _load_factors(of_picture, channels, inside)
    of_picture = rest + picture * 2 * channels + columns
    along = tl.load(of_picture, mask=inside, other=0.0)
    across = tl.load(of_picture + channels, mask=inside, other=0.0)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < count) & inside
        at = base + row * channels + columns
        distance = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        dy = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        dy = _before_activation(dy, distance, factor, offset, ACTIVATE)
        change = factor * dy - along - distance * across
        tl.store(grad_x + at, change.to(grad_x.dtype.element_ty), mask=mask)


def _tile(channels):
    width = triton.next_power_of_2(channels)
    return {"WIDTH": width, "ROWS": max(1, TILE // width), "num_warps": min(max(width // 256, 4), 16)}


def _members(channels, groups):
    return {"WIDTH": triton.next_power_of_2(channels // groups), "BLOCKS": BLOCKS, "num_warps": 4}


def _launch(kernel, x_NPC, rows, *tensors, **flags):
    """Launch a kernel with a program for each block of `rows` positions."""
    pictures, positions, channels = x_NPC.shape
    blocks = cdiv(positions, rows)
    kernel[(pictures * blocks,)](*tensors, positions, channels, rows, blocks, **flags, **_tile(channels))


def group_sums(x_NPC, rows, sums):
    """Launch the kernel that sums blocks of `rows` positions."""
    _launch(group_sums_kernel, x_NPC, rows, x_NPC, sums)


def group_factors(sums, weight, bias, scale_NC, shift_NC, pictures, positions, groups, rows, eps, factors_N4C):
    """Launch the kernel that computes each channel's factors from the sums."""
    channels = sums.shape[2]
    group_factors_kernel[(pictures * groups,)](
        *(sums, weight, bias, scale_NC, shift_NC, factors_N4C, stride(scale_NC), stride(shift_NC)),
        *(positions, channels, groups, rows, cdiv(positions, rows), eps),
        SCALE=scale_NC is not None,
        **_members(channels, groups),
    )


def norm_groups(x_NPC, factors_N4C, rows, activate, out):
    """Launch the second pass of forward."""
    _launch(norm_groups_kernel, x_NPC, rows, x_NPC, factors_N4C, out, ACTIVATE=activate)


def group_gradient_sums(grad, x_NPC, factors_N4C, rows, activate, sums):
    """Launch the first pass of backward."""
    _launch(group_gradient_sums_kernel, x_NPC, rows, grad, x_NPC, factors_N4C, sums, ACTIVATE=activate)


def group_gradients(sums, factors_N4C, weight, bias, scale_NC, positions, groups, dtype, outputs):
    """Launch the kernel between the passes.

    `outputs` are the terms of the second pass, and the gradients of scale, of shift, and of weight and bias.
    """
    pictures, _, channels = factors_N4C.shape
    blocks = len(sums) // pictures
    group_gradients_kernel[(pictures * groups,)](
        *(sums, factors_N4C, weight, bias, scale_NC, *outputs, stride(scale_NC), positions, channels, groups, blocks),
        SCALE=scale_NC is not None,
        **_members(channels, groups),
    )


def norm_groups_backward(grad, x_NPC, factors_N4C, rest_N2C, rows, activate, grad_x):
    """Launch the second pass of backward."""
    _launch(norm_groups_backward_kernel, x_NPC, rows, grad, x_NPC, factors_N4C, rest_N2C, grad_x, ACTIVATE=activate)
