"""Counter-based random numbers: each draw depends only on counter and key, and is equal on every device and layout.

Source: Philox-4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Box-Muller transform.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32)
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_AT_ONCE = 1 << 13

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
    """Return four random 32-bit words per counter, int64 tensors of unsigned values; the key broadcasts."""
    return ten_rounds(counter, key)


def ten_rounds(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
    """Implementation of `philox`, under a name that tracing replaces.

    On CPU, NumPy computes in place, because the launch overhead of a hundred small torch operations dominates.
    """
    tensors = (*counter, *(k for k in key if isinstance(k, Tensor)))
    on_host = all(type(x) is Tensor and x.device.type == "cpu" for x in tensors)
    return _rounds_on_host(counter, key) if on_host and not torch.compiler.is_compiling() else _rounds(counter, key)


def _rounds(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
    """Compute the rounds with torch operations, on any device, also in compiled code."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The constants are reduced by 2**32 so that products fit int64; overflow is undefined in compiled code.
        # (m + 2**32) c = m c + 2**32 c: the low half is that of m c, and c is missing in the high half.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1, c2, c3 = ((b >> 32) + c2) ^ c1 ^ k0, b & MASK32, ((a >> 32) + c0) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + _WEYL_A) & MASK32, (k1 + _WEYL_B) & MASK32
    return c0, c1, c2, c3


def _rounds_on_host(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
    """Compute the rounds with NumPy, a few thousand counters at a time so that words stay in the CPU cache."""
    shape, count = counter[0].shape, counter[0].numel()
    k0, k1 = (
        np.broadcast_to(k.numpy(), shape).reshape(-1).astype(np.uint64) if isinstance(k, Tensor) else k for k in key
    )
    words = np.stack([x.numpy() for x in counter])
    flat = words.reshape(4, -1).view(np.uint64)
    for first in range(0, count, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        keys = (k[part] if isinstance(k, np.ndarray) else np.uint64(k & MASK32) for k in (k0, k1))
        _rounds_in_place(list(flat[:, part]), *keys)
    c0, c1, c2, c3 = torch.from_numpy(words).unbind()
    return c0, c1, c2, c3


def _rounds_in_place(words: list[Any], k0: Any, k1: Any) -> None:
    """Replace four arrays of words, uint64, by their random words."""
    mask, half = np.uint64(MASK32), np.uint64(32)
    a_factor, b_factor = np.uint64(_ROUND_A + (1 << 32)), np.uint64(_ROUND_B + (1 << 32))
    c0, c1, c2, c3 = words
    a, b = np.empty_like(c0), np.empty_like(c0)
    for _ in range(10):
        np.multiply(c0, a_factor, out=a)
        np.multiply(c2, b_factor, out=b)
        np.right_shift(b, half, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, k0, out=c0)
        np.bitwise_and(b, mask, out=c1)
        np.right_shift(a, half, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, k1, out=c2)
        np.bitwise_and(a, mask, out=c3)
        k0, k1 = (k0 + np.uint64(_WEYL_A)) & mask, (k1 + np.uint64(_WEYL_B)) & mask


def to_uniform(word: Tensor) -> Tensor:
    """Map 32-bit words to float32 in the open interval (0, 1)."""
    return ((word >> 9).float() + 0.5) * 2.0**-23


def to_normal(words: Words) -> Words:
    """Map four words to four independent standard normal numbers (float32, |x| < 5.8)."""
    u_P2 = to_uniform(torch.stack(words)).unflatten(0, (2, 2))  # two pairs
    radius_P, angle_P = (-2 * u_P2[:, 0].log()).sqrt(), 2 * math.pi * u_P2[:, 1]
    (x0, x2), (x1, x3) = (radius_P * angle_P.cos()).unbind(), (radius_P * angle_P.sin()).unbind()
    return x0, x1, x2, x3
