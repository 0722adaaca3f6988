"""Counter-based random numbers: each draw is a function of its counter and key, equal on every device and every layout.

Source: Philox-4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Box-Muller transform.
"""

import math

from torch import Tensor

MASK32 = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32)
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
    """Return four random 32-bit words per counter (int64 tensors of unsigned 32-bit values).

    Args:
        counter: four int64 tensors of one shape with values in `[0, 2**32)`.
        key: two 32-bit integers, or tensors of them that broadcast to the counter.

    Returns:
        Four int64 tensors of the same shape, with values in `[0, 2**32)`.
    """
    return ten_rounds(counter, key)


def ten_rounds(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
    """Do the work of `philox`, under a name that tracing replaces to draw without values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The constants are 2**32 too small, so that products fit int64: compiled code is undefined where they do not.
        # (m + 2**32) c = m c + 2**32 c: the low half is that of m c, and c is missing in the high half.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1, c2, c3 = ((b >> 32) + c2) ^ c1 ^ k0, b & MASK32, ((a >> 32) + c0) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + _WEYL_A) & MASK32, (k1 + _WEYL_B) & MASK32
    return c0, c1, c2, c3


def to_uniform(word: Tensor) -> Tensor:
    """Map 32-bit words to float32 in the open interval (0, 1)."""
    return ((word >> 9).float() + 0.5) * 2.0**-23


def to_normal(words: Words) -> Words:
    """Map four words to four independent standard normal numbers (float32, |x| < 5.8)."""
    u0, u1, u2, u3 = (to_uniform(w) for w in words)
    radius0, radius1 = (-2 * u0.log()).sqrt(), (-2 * u2.log()).sqrt()
    angle0, angle1 = 2 * math.pi * u1, 2 * math.pi * u3
    return radius0 * angle0.cos(), radius0 * angle0.sin(), radius1 * angle1.cos(), radius1 * angle1.sin()
