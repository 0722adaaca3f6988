"""Triton kernels for the operations between a projection and attention: RMS norm of each head and rotary positions.

A projection's outputs are ordered by group: P query heads, then optionally a key head and a value head:

    | q0 q1 k0 v0 | q2 q3 k1 v1 | ...       P = 2
      group 0       group 1

Each head is processed as two halves, because rotary positions rotate features i and i + H / 2. Arithmetic is float32.
"""

import triton
import triton.language as tl

from dit.kernels.fused import blocks
from dit.kernels.fused.blocks import GROUPS, cdiv

TOKENS = 16
"""Tokens that a program has in registers at once."""
MAX_REGISTERS = 128
"""Registers per thread of the backward kernel. Without this limit, some versions of ptxas spill to stay below 96."""


@triton.jit
def _load_head(at, columns, half, size, inside):
    a = tl.load(at + columns, mask=inside & (columns < half), other=0.0).to(tl.float32)
    b = tl.load(at + half + columns, mask=inside & (half + columns < size), other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_head(at, columns, half, size, inside, a, b):
    tl.store(at + columns, a.to(at.dtype.element_ty), mask=inside & (columns < half))
    tl.store(at + half + columns, b.to(at.dtype.element_ty), mask=inside & (half + columns < size))


@triton.jit(do_not_specialize=["tokens"])
def heads_kernel(
    x,
    weight_q,
    weight_k,
    cos,
    sin,
    q,
    k,
    token_stride,
    group_stride,
    tokens,
    groups,
    size,
    half,
    eps,
    P: tl.constexpr,
    KEY: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Normalise and rotate the query heads and the key head of some groups, for some tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    inside = token < tokens
    if ROPE:
        c = tl.load(cos + token * half + columns, mask=inside & (columns < half), other=0.0)
        s = tl.load(sin + token * half + columns, mask=inside & (columns < half), other=0.0)
    first = tl.program_id(1) * GROUPS
    for group in range(first, tl.minimum(first + GROUPS, groups)):
        for m in tl.static_range(P + KEY):
            a, b = _load_head(x + token * token_stride + group * group_stride + m * size, columns, half, size, inside)
            if NORM:
                if m < P:
                    wa, wb = _load_head(weight_q, columns, half, size, columns >= 0)
                else:
                    wa, wb = _load_head(weight_k, columns, half, size, columns >= 0)
                inverse = 1.0 / tl.sqrt(tl.sum(a * a + b * b, 1) / size + eps)
                a, b = a * inverse[:, None] * wa, b * inverse[:, None] * wb
            if ROPE:
                a, b = a * c - b * s, b * c + a * s
            if m < P:
                _store_head(q + ((token * groups + group) * P + m) * size, columns, half, size, inside, a, b)
            else:
                _store_head(k + (token * groups + group) * size, columns, half, size, inside, a, b)


@triton.jit(do_not_specialize=["tokens"])
def heads_backward_kernel(
    grad_q,
    grad_k,
    grad_v,
    x,
    weight_q,
    weight_k,
    cos,
    sin,
    grad_x,
    bias_sums,
    weight_sums,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    token_stride,
    group_stride,
    tokens,
    groups,
    size,
    half,
    rows,
    eps,
    P: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    BIAS: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write the gradient of the projection, and sums over each block of `rows` tokens.

    The sums for the gradient of the bias have one row per block. The sums for the norms' weights have one row per
    program, with the query heads of a group, then its key head.
    """
    first_token = tl.program_id(0).to(tl.int64) * rows
    columns = tl.arange(0, HALF)[None, :]
    everywhere = columns >= 0
    parts: tl.constexpr = P + KEY + VALUE
    first = tl.program_id(1) * GROUPS
    for m in tl.static_range(parts):
        if NORM:
            if m < P:
                wa, wb = _load_head(weight_q, columns, half, size, everywhere)
            elif m < P + KEY:
                wa, wb = _load_head(weight_k, columns, half, size, everywhere)
            sum_wa, sum_wb = tl.zeros([TOKENS, HALF], tl.float32), tl.zeros([TOKENS, HALF], tl.float32)
        for group in range(first, tl.minimum(first + GROUPS, groups)):
            sum_a, sum_b = tl.zeros([TOKENS, HALF], tl.float32), tl.zeros([TOKENS, HALF], tl.float32)
            for start in range(0, rows, TOKENS):
                token = first_token + start + tl.arange(0, TOKENS)[:, None]
                inside = token < tokens
                if m < P:
                    at = grad_q + token * q_token + (group * P + m) * q_head
                elif m < P + KEY:
                    at = grad_k + token * k_token + group * k_head
                else:
                    at = grad_v + token * v_token + group * v_head
                a, b = _load_head(at, columns, half, size, inside)
                if ROPE and m < P + KEY:
                    c = tl.load(cos + token * half + columns, mask=inside & (columns < half), other=0.0)
                    s = tl.load(sin + token * half + columns, mask=inside & (columns < half), other=0.0)
                    a, b = a * c + b * s, b * c - a * s
                if NORM and m < P + KEY:
                    at = x + token * token_stride + group * group_stride + m * size
                    na, nb = _load_head(at, columns, half, size, inside)
                    inverse = (1.0 / tl.sqrt(tl.sum(na * na + nb * nb, 1) / size + eps))[:, None]
                    na, nb = na * inverse, nb * inverse
                    sum_wa += a * na
                    sum_wb += b * nb
                    a, b = a * wa, b * wb
                    along = (tl.sum(a * na + b * nb, 1) / size)[:, None]
                    a, b = (a - na * along) * inverse, (b - nb * along) * inverse
                at = grad_x + ((token * groups + group) * parts + m) * size
                _store_head(at, columns, half, size, inside, a, b)
                if BIAS:
                    sum_a += a
                    sum_b += b
            if BIAS:
                width = groups * parts * size
                into = bias_sums + tl.program_id(0).to(tl.int64) * width + (group * parts + m) * size
                total_a, total_b = tl.sum(sum_a, 0)[None, :], tl.sum(sum_b, 0)[None, :]
                _store_head(into, columns, half, size, everywhere, total_a, total_b)
        if NORM and m < P + KEY:
            program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            row = weight_sums + (program * (P + KEY) + m) * size
            all_a, all_b = tl.sum(sum_wa, 0)[None, :], tl.sum(sum_wb, 0)[None, :]
            _store_head(row, columns, half, size, everywhere, all_a, all_b)


@triton.jit(do_not_specialize=["rows"])
def column_sums_kernel(x, out, rows, size, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Sum all rows of some columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(x + row.to(tl.int64) * size + columns, mask=(row < rows) & (columns < size), other=0.0)
    tl.store(out + columns, tl.sum(total, 0)[None, :].to(out.dtype.element_ty), mask=columns < size)


def _sizes(head):
    return {"HALF": triton.next_power_of_2(cdiv(head, 2)), "TOKENS": TOKENS, "GROUPS": GROUPS, "num_warps": 4}


def heads(x_TGMH, weight_q, weight_k, cos, sin, keys, eps, outputs):
    """Launch the forward kernel; x contains only query and key heads, and `outputs` are the queries and keys."""
    tokens, groups, parts, size = x_TGMH.shape
    heads_kernel[cdiv(tokens, TOKENS), cdiv(groups, GROUPS)](
        *(x_TGMH, weight_q, weight_k, cos, sin, *outputs, x_TGMH.stride(0), x_TGMH.stride(1)),
        *(tokens, groups, size, cdiv(size, 2), eps),
        P=parts - keys,
        KEY=int(keys),
        NORM=weight_q is not None or weight_k is not None,
        ROPE=cos is not None,
        **_sizes(size),
    )


def heads_backward(grad_q, grad_k, grad_v, x_TGMH, weight_q, weight_k, cos, sin, groups, eps, bias, outputs):
    """Launch the backward kernel; `outputs` are the gradient of the projection `[T, G, M, H]` and both sums."""
    tokens, _, parts, size = outputs[0].shape
    rows, grads = blocks.ROWS_OF_TILES, (grad_q, grad_k, grad_v)
    key, value = (int(g is not None) for g in grads[1:])
    strides = [0 if g is None else s for g in grads for s in ((0, 0) if g is None else g.stride()[:2])]
    x_strides = (0, 0) if x_TGMH is None else x_TGMH.stride()[:2]
    heads_backward_kernel[cdiv(tokens, rows), cdiv(groups, GROUPS)](
        *(*grads, x_TGMH, weight_q, weight_k, cos, sin, *outputs, *strides, *x_strides),
        *(tokens, groups, size, cdiv(size, 2), rows, eps),
        P=parts - key - value,
        KEY=key,
        VALUE=value,
        NORM=x_TGMH is not None,
        ROPE=cos is not None,
        BIAS=bias,
        maxnreg=MAX_REGISTERS,
        **_sizes(size),
    )


def column_sums(sums, dtype, out):
    """Launch the kernel that sums rows."""
    rows, size = sums.shape
    column_sums_kernel[cdiv(size, 64),](sums, out, rows, size, COLUMNS=64, ROWS=32, num_warps=4)
