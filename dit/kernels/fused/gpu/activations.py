"""Triton kernels of the activations of an MLP: GELU(x + bias), SiLU(gate) * up and GELU(gate) * up, in float32."""

import triton
import triton.language as tl

from dit.kernels.fused import blocks
from dit.kernels.fused.blocks import cdiv

COLUMNS, FORWARD_ROWS = 1024, 16
"""Output columns of a program, and its rows in kernels without sums."""


@triton.jit
def _load(at, bias, columns, width, BIAS: tl.constexpr):
    value = tl.load(at + columns, mask=columns < width, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)
    return value


@triton.jit
def _gelu_argument(x):
    # 0.5 (1 + tanh(u)) = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x ** 3)
    return 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)


@triton.jit
def _gelu_slope(x):
    # 1 - sigmoid(u) loses digits.
    u = _gelu_argument(x)
    return tl.sigmoid(u) * (1.0 + x * tl.sigmoid(-u) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))


@triton.jit(do_not_specialize=["tokens"])
def activation_kernel(
    x,
    bias,
    out,
    tokens,
    width,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute GELU(x + bias), or for GATED=1 SiLU(gate) * up, for GATED=2 GELU(gate) * up.

    `width` is the width of x. With a gate, gate and up features alternate, and the output is half as wide.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for row in range(first, tl.minimum(first + ROWS, tokens)):
        value = _load(x + row * width, bias, columns, width, BIAS)
        if GATED:
            gate, up = tl.split(tl.reshape(value, [COLUMNS // 2, 2]))
            inner = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            at = out + row * (width // 2) + inner
            u = _gelu_argument(gate) if GATED == 2 else gate
            tl.store(at, (gate * tl.sigmoid(u) * up).to(out.dtype.element_ty), mask=inner < width // 2)
        else:
            at = out + row * width + columns
            tl.store(at, (value * tl.sigmoid(_gelu_argument(value))).to(out.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=["tokens"])
def activation_backward_kernel(
    grad,
    x,
    bias,
    grad_x,
    sums,
    tokens,
    width,
    rows,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the gradient of x, and its sum over each block of `rows` tokens (for the gradient of the bias)."""
    first = tl.program_id(0).to(tl.int64) * rows
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for row in range(first, tl.minimum(first + rows, tokens)):
        value = _load(x + row * width, bias, columns, width, BIAS)
        if GATED:
            gate, up = tl.split(tl.reshape(value, [COLUMNS // 2, 2]))
            inner = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            dy = tl.load(grad + row * (width // 2) + inner, mask=inner < width // 2, other=0.0).to(tl.float32)
            if GATED == 2:
                s = tl.sigmoid(_gelu_argument(gate))
                slope = _gelu_slope(gate)
            else:
                s = tl.sigmoid(gate)
                slope = s * (1.0 + gate * tl.sigmoid(-gate))
            change = tl.reshape(tl.join(dy * up * slope, dy * gate * s), [COLUMNS])
        else:
            dy = tl.load(grad + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
            change = dy * _gelu_slope(value)
        tl.store(grad_x + row * width + columns, change.to(grad_x.dtype.element_ty), mask=columns < width)
        if BIAS:
            total += change
    if BIAS:
        tl.store(sums + tl.program_id(0).to(tl.int64) * width + columns, total, mask=columns < width)


def activation(x_TF, bias_F, gate, out):
    """Launch the forward kernel."""
    tokens, width = x_TF.shape
    columns = COLUMNS << (gate > 0)  # input columns
    activation_kernel[cdiv(tokens, FORWARD_ROWS), cdiv(width, columns)](
        *(x_TF, bias_F, out, tokens, width),
        GATED=gate,
        BIAS=bias_F is not None,
        COLUMNS=columns,
        ROWS=FORWARD_ROWS,
        num_warps=4,
    )


def activation_backward(grad, x_TF, bias_F, gate, outputs):
    """Launch the backward kernel; `outputs` are the gradient of x and the sums of the blocks."""
    tokens, width = x_TF.shape
    rows, columns = blocks.ROWS_OF_TILES, COLUMNS << (gate > 0)
    activation_backward_kernel[cdiv(tokens, rows), cdiv(width, columns)](
        *(grad, x_TF, bias_F, *outputs, tokens, width, rows),
        GATED=gate,
        BIAS=bias_F is not None,
        COLUMNS=columns,
        num_warps=4,
    )
