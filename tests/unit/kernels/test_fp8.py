"""Quantisers against the definitions of the formats; products against torch and float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dit.backends.fp8_linear import fp8_linear
from dit.kernels.fp8 import (
    BLOCKS,
    E4M3,
    E5M2,
    NVFP4_BLOCK,
    Fp8Products,
    Quantized,
    emulated,
    quantize_tensor,
    rotated,
    scaled_mm,
)

KINDS = tuple(BLOCKS)
ERRORS = {"tensorwise": (0.04, 0.07), "blockwise": (0.04, 0.04), "mxfp8": (0.04, 0.04), "nvfp4": (0.15, 0.15)}
"""Relative error of an output and of a gradient of normal numbers; e5m2 gradients have 2 bits of mantissa, not 3."""


def numbers_of(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Return all finite, non-negative numbers of a format in order, from its definition."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(steps):
            fraction = mantissa / steps if exponent == 0 else 1 + mantissa / steps
            found.append(math.ldexp(fraction, max(exponent, 1) - bias))
    if exponent_bits == 2:
        return np.array(found)  # e2m1 has neither infinities nor NaN
    if exponent_bits == 4:
        return np.array(found[:-1])  # e4m3 has no infinity, and NaN is its last number
    return np.array(found[:-steps])


E2M1 = "e2m1"
FORMATS = {E4M3: numbers_of(4, 3), E5M2: numbers_of(5, 2), E2M1: numbers_of(2, 1)}


def rounded(x: float, dtype: torch.dtype | str) -> float:
    """Return the nearest number of a format; of two, the one whose last bit is 0."""
    numbers = FORMATS[dtype]
    above = int(np.searchsorted(numbers, abs(x)))
    if above == len(numbers):
        return math.copysign(float(numbers[-1]), x)
    below = max(above - 1, 0)
    distances = abs(x) - numbers[below], numbers[above] - abs(x)
    nearest = below if distances[0] < distances[1] or (distances[0] == distances[1] and below % 2 == 0) else above
    return math.copysign(float(numbers[nearest]), x)


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return normal numbers with many magnitudes, so that each block underflows elsewhere; one row is zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 6, rows)[:, None]
    x *= torch.logspace(8, -8, columns)
    x[rows // 2] = 0
    return x


def expected_tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """Quantise each tile separately: the scale is the smallest power of two for which no number exceeds 448."""
    result = torch.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            tile = x[i : i + rows, j : j + columns]
            amax, scale = float(tile.abs().max()), 2.0**-126
            while amax > 448 * scale:
                scale *= 2
            values = [rounded(v / scale, E4M3) * scale for v in tile.flatten().tolist()]
            result[i : i + rows, j : j + columns] = torch.tensor(values).view_as(tile)
    return result


def expected_nvfp4(x: Tensor, rows: int, columns: int) -> Tensor:
    """Quantise each tile separately: its largest number becomes 6, up to the rounding of its scale to e4m3."""
    result = torch.empty_like(x)
    factor = float(torch.tensor(448.0 * 6) / x.abs().max())
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            tile = x[i : i + rows, j : j + columns]
            scale = rounded(float(tile.abs().max()) / 6 * factor, E4M3) / factor
            values = [rounded(v / scale, E2M1) * scale if scale else 0.0 for v in tile.flatten().tolist()]
            result[i : i + rows, j : j + columns] = torch.tensor(values).view_as(tile)
    return result


def expected_rotation(x: Tensor) -> Tensor:
    """Multiply blocks of 16 rows by the Hadamard matrix, whose signs count the common bits of row and column."""
    signs = torch.tensor([1 if bit == "0" else -1 for bit in "0001011111101011"])
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)])
    blocks = torch.cat([x, x.new_zeros(-len(x) % 16, x.shape[1])]).split(16)
    return torch.cat([hadamard @ (block * signs[:, None]) for block in blocks])


@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
@pytest.mark.parametrize("kind", ["blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_are_along_the_summed_dimension(kind, role, dim):
    x, products = matrix(160, 136), Fp8Products(kind)
    block = NVFP4_BLOCK if kind == "nvfp4" else BLOCKS[kind]
    sides = (1, block) if dim == 1 else (block, 1)
    if kind != "mxfp8" and role == "weight":
        sides = (block, block)
    quantised = products.quantize(x, role, dim, *products.amaxes(x)).dequantized()
    if kind != "nvfp4":
        assert torch.equal(quantised, expected_tiles(x, *sides))
        return
    if dim == 0 and role != "weight":
        x = expected_rotation(x)
    expected = expected_nvfp4(x, *sides)
    assert float((quantised - expected).norm() / expected.norm()) < 1e-6


def test_the_rotation_of_tokens_cancels_in_a_product():
    """It spreads one large number over 16."""
    x, grad = matrix(40, 24, 1), matrix(40, 8, 2)
    assert torch.allclose(rotated(grad).t() @ rotated(x), grad.t() @ x, rtol=1e-4)
    outlier = torch.zeros(16, 1)
    outlier[5] = 4
    assert rotated(outlier).abs().tolist() == [[1.0]] * 16


def test_a_power_of_two_is_rounded_up_only_above_448():
    """OCP's own rule divides 480 by 256, and clips 15/8 of 256 to 7/4."""
    for amax, scale in ((448.0, 1.0), (448.0001, 2.0), (480.0, 2.0), (224.0, 0.5), (0.0, 1.0)):
        x = torch.full((1, 32), amax)
        quantised = Fp8Products("mxfp8").quantize(x, "input", 1)
        assert quantised.scale.tolist() == [[scale]]
        assert quantised.dequantized()[0, 0] == rounded(amax / scale, E4M3) * scale


@pytest.mark.parametrize(("role", "dtype"), [("input", E4M3), ("weight", E4M3), ("gradient", E5M2)])
def test_tensorwise_scaling_maps_the_largest_magnitude_to_the_largest_number(role, dtype):
    x = matrix(24, 40)
    products = Fp8Products("tensorwise")
    quantised = products.quantize(x, role, 1, *products.amaxes(x))
    largest = float(FORMATS[dtype][-1])
    factor = torch.tensor(largest) / x.abs().max()
    expected = torch.tensor([rounded(v, dtype) for v in (x * factor).flatten().tolist()]).view_as(x)
    assert quantised.values.dtype == dtype
    assert torch.equal(quantised.values.float(), expected)
    assert float(quantised.values.float().abs().max()) == largest
    assert torch.allclose(quantised.scale, 1 / factor, rtol=1e-6)


def test_nonfinite_numbers_stay_nonfinite():
    """A run must see them in its loss; saturated values would look like ordinary numbers."""
    for kind in KINDS:
        for value in (math.inf, math.nan):
            x = torch.ones(4, 128)
            x[1, 3] = value
            products = Fp8Products(kind)
            assert not products.quantize(x, "input", 1, *products.amaxes(x)).dequantized()[1, 3].isfinite()


def test_zeros_stay_zeros():
    for kind in KINDS:
        products, x = Fp8Products(kind), torch.zeros(16, 128)
        assert torch.equal(products.quantize(x, "gradient", 0, *products.amaxes(x)).dequantized(), x)


@pytest.mark.parametrize("summed", [64, 100])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_gpu_instruction_equals_the_emulation(dtype, summed):
    """`torch._scaled_mm` also works on CPU; sums over 100 are padded with zeros to a multiple of 16."""

    def operand(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Quantized:
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        return quantize_tensor(x, dtype, x.abs().max())

    a, b = operand(48, summed, dtype, 1), operand(32, summed, E4M3, 2)
    for right in (b.transposed, operand(summed, 32, E4M3, 3)):
        exact = a.dequantized().double() @ right.dequantized().double()
        for multiply in (emulated, scaled_mm):
            product = multiply(a, right, torch.float32)
            assert float((product - exact).norm() / exact.norm()) < 1e-6, multiply.__name__
        assert torch.allclose(scaled_mm(a, right, torch.bfloat16), emulated(a, right, torch.bfloat16), rtol=2**-7)


def reference(kind: str, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three products in float64, from the formula of each operand."""
    if kind == "tensorwise":

        def q(matrix: Tensor, rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
            factor = torch.tensor(float(FORMATS[dtype][-1])) / matrix.abs().max()
            values = [rounded(v, dtype) for v in (matrix * factor).flatten().tolist()]
            return torch.tensor(values, dtype=torch.float64).view_as(matrix) / factor
    elif kind == "nvfp4":

        def q(matrix: Tensor, rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
            matrix = expected_rotation(matrix) if columns == 1 < rows else matrix
            return expected_nvfp4(matrix, rows, columns).double()
    else:

        def q(matrix: Tensor, rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
            return expected_tiles(matrix, rows, columns).double()

    b = NVFP4_BLOCK if kind == "nvfp4" else BLOCKS[kind]
    square = None if kind == "mxfp8" else (b, b)
    y = q(x, 1, b) @ q(weight, *(square or (1, b))).t()
    grad_x = q(grad, 1, b, E5M2) @ q(weight, *(square or (b, 1)))
    grad_weight = q(grad, b, 1, E5M2).t() @ q(x, b, 1)
    return y, grad_x, grad_weight


@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_layer_and_its_gradients_equal_the_formula(kind):
    x, weight, grad = matrix(48, 128, 1), matrix(64, 128, 2), matrix(48, 64, 3)
    bias = torch.randn(64)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    y = fp8_linear(Fp8Products(kind), x, weight, bias)
    y.backward(grad)
    plain = x.detach(), weight.detach(), grad
    expected = reference(kind, *plain)
    without_bias = fp8_linear(Fp8Products(kind), x, weight, None)
    assert torch.equal(y, without_bias + bias)
    for product, reference_product in zip((without_bias.detach(), x.grad, weight.grad), expected):
        for dim in (0, 1):  # relative to each column and to each row
            errors, norms = ((product - reference_product).norm(dim=dim), reference_product.norm(dim=dim))
            assert (errors <= 1e-5 * norms).all()
    assert torch.allclose(bias.grad, grad.sum(0))


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_products_are_near_unquantised_products(kind):
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(n, 128, generator=generator) for n in (256, 128, 256))
    x.requires_grad_(), weight.requires_grad_()
    y, exact = fp8_linear(Fp8Products(kind), x, weight, None), torch.nn.functional.linear(x, weight)
    pairs = zip(
        (y, *torch.autograd.grad(y, (x, weight), grad)), (exact, *torch.autograd.grad(exact, (x, weight), grad))
    )
    errors = [float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs]
    output, gradient = ERRORS[kind]
    assert 0.01 < errors[0] < output
    assert 0.01 < max(errors[1:]) < gradient


def test_a_frozen_weight_has_no_gradient():
    x, weight = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
    fp8_linear(Fp8Products("mxfp8"), x, weight, None).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
