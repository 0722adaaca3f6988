"""Triton kernel that adds gradients to main gradients: one pass over the elements of many parameters.

addresses   gradient, main gradient, elements      one row per parameter
chunks      (0, 0) (0, 1) (1, 0) ...               parameter, chunk; one program each
"""

import triton
import triton.language as tl
from torch import Tensor

from dit.kernels.fused.gpu.adamw import _address, _read, _write

COLUMNS = tl.constexpr(3)
BLOCK, CHUNK = 1024, 16384
"""Elements that a program has in registers at once, and all elements of a program."""


@triton.jit
def _add(gradient, main, start, count, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    inside = at < count
    _write(main + at, _read(main + at, inside, WHOLE) + _read(gradient + at, inside, WHOLE), inside, WHOLE)


@triton.jit
def add_gradients_kernel(
    addresses, chunks, HALF: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Add one chunk of one gradient; `HALF` is whether gradients are fp16 instead of bf16."""
    entry = chunks + tl.program_id(0) * 2
    row = addresses + tl.load(entry).to(tl.int64) * COLUMNS
    first = tl.load(entry + 1).to(tl.int64) * CHUNK
    gradient = _address(row, 0, first, tl.float16 if HALF else tl.bfloat16, ALIGNED)
    main = _address(row, 1, first, tl.float32, ALIGNED)
    count = tl.minimum(tl.load(row + 2) - first, CHUNK).to(tl.int32)
    full = count // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        _add(gradient, main, start, count, True, BLOCK)
    if full < count:
        _add(gradient, main, full, count, False, BLOCK)


def add_gradients(addresses: Tensor, chunks: Tensor, *, half: bool, aligned: bool) -> None:
    """Launch the kernel over all chunks."""
    add_gradients_kernel[(len(chunks),)](
        addresses, chunks, HALF=half, ALIGNED=aligned, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=4
    )
