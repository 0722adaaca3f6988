"""Noise drawn inside a kernel: its random words equal `dit.philox` to the bit; mixtures are compared in float64."""

import math

import pytest
import torch
import triton
import triton.language as tl

from dit.kernels.fused.gpu.noise import _radius, random_words
from dit.kernels.fused.noise import mix
from dit.layout import CLEAN, SequenceLayout
from dit.levels import with_levels
from dit.objectives.addressed_noise import AddressedNoise
from dit.philox import MASK32, philox
from tests.interpreted.formulas import ULP

SEED, STEP = 2**40 + 12345, 977
IDS = torch.tensor([3, 2**62 + 5, -(2**33) - 41], dtype=torch.int64)
DRAWS = torch.tensor([9, 2**40, 0], dtype=torch.int64)
PADDED = SequenceLayout.from_lengths([9, 2, 13], multiple_of=4, total_tokens=37)
LAYOUTS = {
    "tokens": SequenceLayout.from_lengths([1, 1, 1]),
    "dense": SequenceLayout.from_lengths([6, 6, 6]),
    "ragged_padded": PADDED,
    "any_order": PADDED.select(torch.randperm(37, generator=torch.Generator().manual_seed(1))[:21]),
    "many": SequenceLayout.from_lengths([200, 3, 111]),
}
SEEDS = {"pack": SEED, "negative": -7, "samples": torch.tensor([1, 2**45 + 3, -9])}
# Of the radius of a Box-Muller pair: logarithm, square root, sine or cosine by series, and two products.
NORMAL_ULPS = 6


@triton.jit
def words_kernel(k0, k1, element, step, address, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    key0, key1, time = tl.load(k0 + at), tl.load(k1 + at), tl.load(step + at)
    w0, w1, w2, w3 = random_words(key0, key1, tl.load(element + at), time, tl.load(address + at))
    tl.store(out + at, w0.to(tl.int64))
    tl.store(out + COUNT + at, w1.to(tl.int64))
    tl.store(out + 2 * COUNT + at, w2.to(tl.int64))
    tl.store(out + 3 * COUNT + at, w3.to(tl.int64))


def test_the_words_are_bitwise_equal_to_philox():
    """Counters and keys include 0 and the maximum of 32 bits; addresses have 64 bits."""
    generator = torch.Generator().manual_seed(4)
    draws = [torch.randint(0, 2**32, (64,), generator=generator) for _ in range(6)]
    for given in draws:
        given[0], given[1] = 0, 2**32 - 1
    k0, k1, element, step, low, high = draws
    out = torch.empty(4, 64, dtype=torch.int64)
    words_kernel[(1,)](k0, k1, element, step, low | (high << 32), out, COUNT=64)
    assert torch.equal(out, torch.stack(philox((element, step, low, high), (k0, k1))))


def noise_of(layout, seed=SEED, kernel=mix):
    return AddressedNoise(seed, STEP, IDS, layout, DRAWS, kernel)


def words_of(noise, step, ids, seed, element):
    """Return the random words for these elements of these samples."""
    counter = element, torch.tensor(step), ids & MASK32, (ids >> 32) & MASK32
    e, s, low, high = torch.broadcast_tensors(*counter)
    return philox((e, s, low, high), noise.key("eps", seed))


def normals(layout, seed, channels):
    """Return the Box-Muller transform of the eager words in float64, and the radius of each number."""
    eager = noise_of(layout, seed, None)
    blocks = -(-channels // 4)
    element = layout.token_index_T[:, None] * blocks + torch.arange(blocks)
    of_token = layout.segment_ids_T[:, None]
    seeds = seed if isinstance(seed, int) else seed[of_token]
    words = words_of(eager, STEP, eager.ids_S[of_token], seeds, element)
    u0, u1, u2, u3 = (((w >> 9).double() + 0.5) * 2.0**-23 for w in words)
    pairs = [((-2 * u.log()).sqrt(), 2 * math.pi * v) for u, v in ((u0, u1), (u2, u3))]
    numbers = [f(angle) * radius for radius, angle in pairs for f in (torch.cos, torch.sin)]
    radii = [radius for radius, _ in pairs for _ in range(2)]
    return (torch.stack(x, -1).flatten(1)[:, :channels] for x in (numbers, radii))


# Each layout and kind of seed at least once. Channels: one; enough for two programs; multiples of four and others;
# a number of counters per token that is not a power of two.
PURE_NOISE = [
    *(("tokens", "pack", 770), ("ragged_padded", "samples", 10), ("any_order", "negative", 16)),
    *(("many", "samples", 1), ("many", "pack", 3), ("dense", "negative", 64)),
]


@pytest.mark.parametrize(("layout", "seed", "channels"), PURE_NOISE)
def test_pure_noise_is_the_box_muller_transform_of_the_words(layout, seed, channels):
    """Mixed with coefficient 0 for x0 and 1 for the noise."""
    layout, seed = LAYOUTS[layout], SEEDS[seed]
    zeros, ones = torch.zeros(3), torch.ones(3)
    x0 = torch.randn(layout.num_local_tokens, channels)
    (noise,) = noise_of(layout, seed).mix(x0, (zeros, ones))
    want, radius = normals(layout, seed, channels)
    assert noise.shape == x0.shape
    assert float(((noise.double() - want).abs() / radius).max()) <= NORMAL_ULPS * ULP[torch.float32]


@triton.jit
def radius_kernel(u, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, _radius(tl.load(u + at)))


def test_the_logarithm_is_exact_at_its_ends():
    """The 2,048 numbers closest to 0 and to 1; close to 1 the radius is small and cancellation costs digits."""
    steps = torch.arange(2048) + 0.5
    u = torch.cat([steps, 2**23 - steps]).float() * 2.0**-23
    radius = torch.empty(4096)
    radius_kernel[(1,)](u, radius, COUNT=4096)
    want = (-2 * u.double().log()).sqrt()
    assert float(((radius.double() - want).abs() / want).max()) <= NORMAL_ULPS * ULP[torch.float32]


def test_mixtures_have_the_coefficients_of_noise_levels():
    """Equal to the eager form for samples with two levels and clean tokens, and for local tokens in any order."""
    layout = with_levels(PADDED, [[(4, CLEAN), (5, 0)], [], [(3, 0), (9, 1), (1, CLEAN)]])
    layout = layout.select(torch.randperm(37, generator=torch.Generator().manual_seed(1))[:21])
    x0, offset = torch.randn(21, 6), torch.randn(3, 6)
    pairs = [tuple(torch.randn(2, 6)) for _ in range(2)]
    for seed in SEEDS.values():
        ours, theirs = (noise_of(layout, seed, kernel).mix(x0, *pairs, offset_SC=offset) for kernel in (mix, None))
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_mixtures_of_one_noise_in_bf16_latents():
    """For three mixtures, the kernel computes two, then the third."""
    generator = torch.Generator().manual_seed(2)
    x0 = torch.randn(37, 6, generator=generator).bfloat16()
    pairs = [tuple(torch.randn(2, 3, generator=generator)) for _ in range(3)]
    got = noise_of(PADDED).mix(x0, *pairs)
    eps, radius = normals(PADDED, SEED, 6)
    for ours, (a, b) in zip(got, pairs, strict=True):
        a, b = (x.double()[PADDED.segment_ids_T][:, None] for x in (a, b))
        size = (a * x0.double()).abs() + b.abs() * radius
        error = (ours.double() - (a * x0.double() + b * eps)).abs() / size
        assert float(error.max()) <= (NORMAL_ULPS + 2) * ULP[torch.float32]
