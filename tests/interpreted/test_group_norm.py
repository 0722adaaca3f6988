"""The fused group norm with scale, shift and SiLU against its formula in float64: values and every gradient."""

import pytest
import torch

from dit.kernels import group_norm as eager
from dit.kernels.fused import group_norm as fused
from dit.kernels.fused import picture_ops
from dit.kernels.group_norm import Groups
from tests.interpreted import formulas
from tests.support.ranks import rows

DTYPES = {"fp32": (torch.float32, 8.0), "bf16": (torch.bfloat16, 1.5)}
EPS = 1e-5
# Pictures, channels, height and width, groups: odd sizes; one group; one channel per group; positions that fit one
# block, and positions that need several blocks, of which the last one is not full.
SIZES = {
    "small": (2, 6, 3, 5, 3),
    "one_group": (3, 10, 4, 4, 1),
    "each_channel": (1, 7, 9, 2, 7),
    "blocks": (2, 12, 13, 11, 4),
    "wide": (1, 320, 3, 3, 8),
    "odd_wide": (2, 1030, 3, 1, 10),
    "widest": (1, 4096, 2, 1, 4),
}
KINDS = {"plain": (False, False), "silu": (False, True), "scaled": (True, False), "scaled_silu": (True, True)}


def formula(x, weight, bias, scale, shift, groups, activate):
    parts = x.unflatten(1, (groups, -1))
    centred = parts - parts.mean((2, 3, 4), keepdim=True)
    normed = (centred / (centred.square().mean((2, 3, 4), keepdim=True) + EPS).sqrt()).flatten(1, 2)
    y = normed * weight[:, None, None] + bias[:, None, None]
    if scale is not None:
        y = y * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
    return [y / (1 + torch.exp(-y)) if activate else y]


def check(size, kind, precision="fp32"):
    """Compare kernel and formula; errors are relative to the largest number of each picture."""
    pictures, channels, height, width, groups = size
    scaled, activate = KINDS[kind]
    dtype, ulps = DTYPES[precision]
    small = (pictures, channels) if scaled else None
    leaves = formulas.draws((pictures, height * width * channels), (channels,), (channels,), small, small)

    def as_pictures(x):
        return x.view(pictures, height, width, channels).permute(0, 3, 1, 2)

    def kernel(x, weight, bias, scale, shift):
        y = fused.norm_groups(as_pictures(x), Groups(weight, bias, groups, EPS), scale, shift, activate=activate)
        return [y.permute(0, 2, 3, 1).flatten(1)]

    def reference(x, *given):
        return [formula(as_pictures(x), *given, groups, activate)[0].permute(0, 2, 3, 1).flatten(1)]

    formulas.check(kernel, reference, leaves, dtype, ulps)


@pytest.mark.parametrize(
    "size", rows([(size,) for size in SIZES], lambda size: size in ("small", "blocks", "odd_wide"))
)
def test_every_size_equals_the_formula(size):
    check(SIZES[size], "scaled_silu")


@pytest.mark.parametrize(
    ("kind", "precision"),
    rows(
        [(kind, "bf16" if kind == "scaled_silu" else "fp32") for kind in KINDS],
        lambda kind, _: kind in ("plain", "scaled_silu"),
    ),
)
def test_every_kind_equals_the_formula(kind, precision):
    check((2, 12, 5, 7, 4), kind, precision)


def test_a_large_mean_cancels_no_digits():
    """The variance is computed from distances to the mean, so a mean of 1000 standard deviations costs no precision."""
    size = (2, 8, 6, 7, 2)
    pictures, channels, height, width, groups = size
    x = 1000.0 + torch.randn(pictures, height, width, channels, generator=torch.Generator().manual_seed(0))
    x = x.permute(0, 3, 1, 2)
    ones, zeros = torch.ones(channels), torch.zeros(channels)
    got = fused.norm_groups(x, Groups(ones, zeros, groups, EPS)).double()
    want = formula(x.double(), ones.double(), zeros.double(), None, None, groups, False)[0]
    assert float((got - want).abs().max()) <= 1000 * 2.0**-23


def test_the_numbers_of_a_group_may_exceed_32_bits():
    """One group of 64 channels and 2**27 positions, in one block with a mean of 3 and a variance of 2."""
    positions, channels = 2**27, 64
    ones, zeros = torch.ones(channels), torch.zeros(channels)
    sums = torch.tensor([3.0, 2.0 * positions]).repeat_interleave(channels).view(1, 2, channels)
    factors = picture_ops.group_factors(sums, ones, zeros, None, None, 1, positions, 1, positions, 0.0)
    assert torch.allclose(factors[0, :, 0], torch.tensor([3.0, 0.5**0.5, 0.0, 0.5**0.5]))
    gradients = picture_ops.group_gradients(
        positions * torch.ones(1, 2, channels), torch.ones(1, 4, channels), ones, zeros, None, positions, 1, ones.dtype
    )
    assert torch.allclose(gradients[0], torch.ones(1, 2, channels))


def test_the_scale_may_be_a_part_of_a_wider_tensor():
    x = torch.randn(2, 6, 3, 4).contiguous(memory_format=torch.channels_last)
    wide = torch.randn(2, 12, requires_grad=True)
    groups = Groups(torch.randn(6), torch.randn(6), 2, EPS)
    found = []
    for function in (fused.norm_groups, eager.norm_groups):
        scale, shift = wide.chunk(2, 1)
        out = function(x, groups, scale, shift, activate=True)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), wide)))
    for kernel, reference in zip(*found):
        torch.testing.assert_close(kernel, reference, rtol=1e-4, atol=1e-5)


def test_channels_last_pictures_are_not_copied_and_others_are():
    x = torch.randn(2, 6, 3, 4)
    groups = Groups(torch.randn(6), torch.randn(6), 2, EPS)
    last = fused.norm_groups(x.contiguous(memory_format=torch.channels_last), groups)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(fused.norm_groups(x, groups), last)


def test_results_are_bitwise_equal_in_every_call_and_batch():
    x = torch.randn(3, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    groups = Groups(torch.randn(8), torch.randn(8), 2, EPS)
    out = fused.norm_groups(x, groups, activate=True)
    assert torch.equal(out, fused.norm_groups(x, groups, activate=True))
    assert torch.equal(out[:1], fused.norm_groups(x[:1], groups, activate=True))
