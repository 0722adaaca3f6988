"""Triton kernel that generates counter-based noise in registers and writes only its mix with clean latents.

A counter covers four channels, so that its four random numbers stay in one thread:

    token    0         0         0         1   ...
    counter  0 (0..3)  1 (4..7)  2 (8, 9)  3 (0..3)        10 channels
"""

import triton
import triton.language as tl

from dit.kernels.fused.blocks import cdiv

COUNTERS = 256
"""Counters per program, i.e. 1024 random numbers."""


@triton.jit
def _uniform(word):
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _radius(u):
    """Compute sqrt(-2 log u) for u in (0, 1): log u = e log 2 + 2 artanh((m - 1) / (m + 1)), with mantissa m."""
    bits = u.to(tl.int32, bitcast=True)
    # Mantissas are in sqrt(1 / 2) to sqrt(2), which avoids cancellation near u = 1.
    exponent = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = 1.0 + z * (0.3333333333333333 + z * (0.2 + z * (0.14285714285714285 + z * 0.1111111111111111)))
    return tl.sqrt(-2.0 * (exponent.to(tl.float32) * 0.6931471805599453 + 2.0 * s * series))


@triton.jit
def _turn(u):
    """Compute cos and sin of 2 pi u for u in (0, 1), by an exact nearest quarter turn and a series for the rest."""
    quarter = (4.0 * u + 0.5).to(tl.int32)
    x = (u - 0.25 * quarter.to(tl.float32)) * 6.283185307179586
    z = x * x
    c = 1.0 + z * (-0.5 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 - z / 3628800))))
    s = x * (1.0 + z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z / 362880))))
    odd, half = (quarter & 1) == 1, quarter & 3
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where((half == 1) | (half == 2), -cos, cos), tl.where(half >= 2, -sin, sin)


@triton.jit
def random_words(k0, k1, element, step, address):
    """Return the four words of `dit.philox.philox` for counters (element, step, low, high word of the address)."""
    return tl.philox(
        (k0 & 0xFFFFFFFF) | (k1 << 32),
        element.to(tl.uint32),
        step.to(tl.uint32),
        (address & 0xFFFFFFFF).to(tl.uint32),
        (address >> 32).to(tl.uint32),
        10,
    )


@triton.jit(do_not_specialize=["key0", "key1", "tokens", "samples"])
def mix_kernel(
    x0,
    first,
    second,
    segments,
    tokens_of_sample,
    ids,
    seeds,
    pairs,
    key0,
    key1,
    step,
    tokens,
    samples,
    CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SEEDS: tl.constexpr,
    SECOND: tl.constexpr,
    COUNTERS: tl.constexpr,
):
    """Write a x0 + b noise for one or two pairs (a, b) of each sample.

    The key is (key0, key1); with SEEDS, it is the exclusive or of these words and each sample's seed. `step` is the
    address of the step.
    """
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    token, block = counter // BLOCKS, (counter % BLOCKS).to(tl.int32)
    inside = token < tokens
    sample = tl.load(segments + token, mask=inside, other=0)
    element = tl.load(tokens_of_sample + token, mask=inside, other=0) * BLOCKS + block
    address = tl.load(ids + sample, mask=inside, other=0)
    k0, k1 = tl.zeros([COUNTERS], tl.int64) + key0, tl.zeros([COUNTERS], tl.int64) + key1
    if SEEDS:
        seed = tl.load(seeds + sample, mask=inside, other=0)
        k0, k1 = k0 ^ seed, k1 ^ (seed >> 32)
    time = tl.zeros([COUNTERS], tl.int64) + tl.load(step)
    w0, w1, w2, w3 = random_words(k0, k1, element, time, address)
    radius0, radius1 = _radius(_uniform(w0)), _radius(_uniform(w2))
    cos0, sin0 = _turn(_uniform(w1))
    cos1, sin1 = _turn(_uniform(w3))
    even, odd = tl.join(radius0 * cos0, radius1 * cos1), tl.join(radius0 * sin0, radius1 * sin1)
    noise = tl.reshape(tl.join(even, odd), [COUNTERS, 4])
    channel = (block * 4)[:, None] + tl.arange(0, 4)[None, :]
    mask = inside[:, None] & (channel < CHANNELS)
    at = (token * CHANNELS)[:, None] + channel
    clean = tl.load(x0 + at, mask=mask, other=0.0).to(tl.float32)
    a, b = tl.load(pairs + sample, mask=inside, other=0.0), tl.load(pairs + samples + sample, mask=inside, other=0.0)
    tl.store(first + at, a[:, None] * clean + b[:, None] * noise, mask=mask)
    if SECOND:
        of_second = pairs + 2 * samples + sample
        a, b = tl.load(of_second, mask=inside, other=0.0), tl.load(of_second + samples, mask=inside, other=0.0)
        tl.store(second + at, a[:, None] * clean + b[:, None] * noise, mask=mask)


def mix(x0_TC, segments_T, token_index_T, ids_S, seeds_S, pairs, key0, key1, step, outputs):
    """Launch the kernel; there is one output for each of the pairs `[K, 2, S]`. `step` is one number, int64."""
    tokens, channels = x0_TC.shape
    blocks = cdiv(channels, 4)
    mix_kernel[(cdiv(tokens * blocks, COUNTERS),)](
        *(x0_TC, outputs[0], outputs[-1], segments_T, token_index_T, ids_S, seeds_S, pairs, key0, key1, step),
        *(tokens, pairs.shape[2]),
        CHANNELS=channels,
        BLOCKS=blocks,
        SEEDS=seeds_S is not None,
        SECOND=len(outputs) > 1,
        COUNTERS=COUNTERS,
        num_warps=4,
    )
