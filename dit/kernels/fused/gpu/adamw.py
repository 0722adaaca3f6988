"""Triton kernel of AdamW, the weight average and the model's copy: one pass over the elements of many parameters.

Parameters may be anywhere in memory. A table contains their addresses, and each program updates one chunk of one
parameter:

    addresses   gradient, main, exp_avg, exp_avg_sq, average, model, elements      one row per parameter
    chunks      (0, 0) (0, 1) (0, 2) (1, 0) ...                                    parameter, chunk
"""

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = tl.constexpr(7)
BLOCK, CHUNK = 512, 16384
"""Elements that a program has in registers at once, and all elements of a program."""


@triton.jit
def _address(row, column, first, kind: tl.constexpr, ALIGNED: tl.constexpr):
    at = tl.load(row + column).to(tl.pointer_type(kind)) + first
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def _read(at, inside, WHOLE: tl.constexpr):
    return tl.load(at) if WHOLE else tl.load(at, mask=inside, other=0.0)


@triton.jit
def _write(at, value, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=inside)


@triton.jit
def _update(
    gradient,
    main,
    exp_avg,
    exp_avg_sq,
    average,
    model,
    start,
    count,
    clip,
    decay,
    rate1,
    rate2,
    step_size,
    root,
    eps,
    weight,
    AVERAGE: tl.constexpr,
    MODEL: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = start + tl.arange(0, BLOCK)
    inside = at < count
    g = _read(gradient + at, inside, WHOLE) * clip
    p, m, v = _read(main + at, inside, WHOLE), _read(exp_avg + at, inside, WHOLE), _read(exp_avg_sq + at, inside, WHOLE)
    p -= decay * p
    m += (g - m) * rate1
    v += (g * g - v) * rate2
    p -= step_size * m / (tl.sqrt(v) * root + eps)
    _write(main + at, p, inside, WHOLE)
    _write(exp_avg + at, m, inside, WHOLE)
    _write(exp_avg_sq + at, v, inside, WHOLE)
    if AVERAGE:
        a = _read(average + at, inside, WHOLE)
        # Select the form that is exact at each end, so that a weight of 1 copies.
        a = tl.where(weight < 0.5, a + (p - a) * weight, p - (p - a) * (1.0 - weight))
        _write(average + at, a, inside, WHOLE)
    if MODEL:
        _write(model + at, p.to(model.dtype.element_ty), inside, WHOLE)


@triton.jit
def adamw_kernel(
    addresses,
    chunks,
    clip,
    rates,
    AVERAGE: tl.constexpr,
    MODEL: tl.constexpr,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Update one chunk of one parameter; full blocks need no mask, which allows accesses of 128 bits.

    Args:
        clip: address of the factor of the gradient; NaN if nothing may change.
        rates: address of `dit.kernels.adamw.Rates.values`.
        HALF: whether the model weights are fp16 instead of bf16.
    """
    factor = tl.load(clip)
    decay, rate1, rate2 = tl.load(rates), tl.load(rates + 1), tl.load(rates + 2)
    step_size, root, eps, weight = tl.load(rates + 3), tl.load(rates + 4), tl.load(rates + 5), tl.load(rates + 6)
    entry = chunks + tl.program_id(0) * 2
    row = addresses + tl.load(entry).to(tl.int64) * COLUMNS
    first = tl.load(entry + 1).to(tl.int64) * CHUNK
    gradient, main = _address(row, 0, first, tl.float32, ALIGNED), _address(row, 1, first, tl.float32, ALIGNED)
    exp_avg, exp_avg_sq = _address(row, 2, first, tl.float32, ALIGNED), _address(row, 3, first, tl.float32, ALIGNED)
    average = _address(row, 4, first, tl.float32, ALIGNED)
    model = _address(row, 5, first, tl.float16 if HALF else tl.bfloat16, ALIGNED)
    count = tl.minimum(tl.load(row + 6) - first, CHUNK).to(tl.int32)
    count = tl.where(factor == factor, count, 0)
    full = count // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        _update(
            *(gradient, main, exp_avg, exp_avg_sq, average, model, start, count),
            *(factor, decay, rate1, rate2, step_size, root, eps, weight, AVERAGE, MODEL, True, BLOCK),
        )
    if full < count:
        _update(
            *(gradient, main, exp_avg, exp_avg_sq, average, model, full, count),
            *(factor, decay, rate1, rate2, step_size, root, eps, weight, AVERAGE, MODEL, False, BLOCK),
        )


def adamw(
    addresses: Tensor,
    chunks: Tensor,
    clip: Tensor,
    rates: Tensor,
    *,
    average: bool,
    model: bool,
    half: bool,
    aligned: bool,
) -> None:
    """Launch the kernel over all chunks."""
    adamw_kernel[(len(chunks),)](
        addresses,
        chunks,
        clip,
        rates,
        AVERAGE=average,
        MODEL=model,
        HALF=half,
        ALIGNED=aligned,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        num_warps=4,
    )
