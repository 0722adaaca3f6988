"""Products of matrices that are quantised to floating-point numbers of 8 bits (FP8), or of 4 bits.

A quantised matrix has values and scales; `value * scale` is close to the matrix. Four kinds of scaling:

    tensorwise    one scale for the matrix: amax / 448 (e4m3), or amax / 57344 for gradients (e5m2)
    blockwise     one scale for 128 numbers along the summed dimension, or for 128 x 128 of a weight; a power of two
    mxfp8         one scale for 32 numbers along the summed dimension; a power of two (E8M0)
    nvfp4         4-bit values (e2m1); one scale for 16 numbers along the summed dimension, or for 16 x 16 of a weight;
                  an e4m3 number divided by a factor of the matrix

A linear layer y = x w^T has three products, and the summed dimension differs:

    y  = q(x) q(w)^T      sums over the input features
    dx = q(dy) q(w)       sums over the output features
    dw = q(dy)^T q(x)     sums over the tokens

Except under `tensorwise`, a matrix is therefore quantised twice, each time from the original numbers. A power of two
is rounded up, so that no value exceeds 448. Under `nvfp4`, both factors of dw are first multiplied by an orthogonal
matrix along the tokens, which spreads outliers over a block and cancels in the product.

Sources: Transformer Engine's recipes Float8CurrentScaling with its default HYBRID format, Float8BlockScaling,
MXFP8BlockScaling and NVFP4BlockScaling (`common/recipe/__init__.py`). Its MXFP8 scale is rounded up
(`cvt.rp.satfinite.ue8m0x2`); Open Compute Project, Microscaling Formats v1.0, section 6.3, rounds it down and clips,
which loses the largest numbers. Its NVFP4 gradients are rounded stochastically; here, all numbers are rounded to the
nearest, so that layouts agree.

Shape suffixes: M rows, N columns, K summed dimension.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from dit.errors import ConfigError
from dit.kernels.choice import Implementation, Op, capability, on_cuda
from dit.settings import Fp8

Role = Literal["input", "weight", "gradient"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_MANTISSA, E4M3_EXPONENT = math.frexp(torch.finfo(E4M3).max)
E4M3_MAX, E2M1_MAX = torch.finfo(E4M3).max, 6.0
BLOCKS: dict[Fp8, int] = {"tensorwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 32}
"""Size of a block, or the numbers in the 16 bytes that tensor cores read at once.

Ranks must not cut it: the local features of a product, and the local tokens of a sample, are a multiple of it.
"""
NVFP4_BLOCK = 16


def check_features(fp8: Fp8, count: int, ranks: int, name: str = "features of a linear layer") -> None:
    """Check that tensor-parallel ranks cut no block of features."""
    unit = BLOCKS[fp8] * ranks
    if count % unit == 0:
        return
    fits = [n for n in range(1, ranks) if count % (BLOCKS[fp8] * n) == 0]
    sizes = " or ".join(str(n) for n in (count // unit * unit, -(-count // unit) * unit) if n)
    raise ConfigError(
        f"training.fp8={fp8} needs a multiple of {BLOCKS[fp8]} {name} on each rank, and {count} on {ranks} "
        f"tensor-parallel rank{'s' if ranks > 1 else ''} are {count / ranks:g}; use {sizes}"
        + (f", tensor_model_parallel_size={fits[-1]}" if fits else "")
        + ", or training.fp8=None"
    )


@dataclass(frozen=True)
class Quantized:
    """A quantised matrix.

    Attributes:
        scale: float32, one number for each tile of the matrix.
        tile: rows and columns of a tile; None for one tile.
    """

    values: Tensor
    scale: Tensor
    tile: Optional[tuple[int, int]] = None

    @property
    def transposed(self) -> "Quantized":
        return Quantized(self.values.t(), self.scale.t(), self.tile and self.tile[::-1])

    def dequantized(self) -> Tensor:
        """Return the float32 matrix that the product uses."""
        scale = self.scale
        for dim, size in enumerate(self.tile or ()):
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, self.values.shape[dim])
        return self.values.float() * scale


def quantize_tensor(x: Tensor, dtype: torch.dtype, amax: Tensor) -> Quantized:
    """Quantise a matrix with one scale.

    Args:
        amax: largest magnitude of the matrix, over all ranks that have a part of it.
    """
    largest = torch.finfo(torch.float32).max
    factor = (torch.finfo(dtype).max / amax).clamp(max=largest)
    factor = torch.where(amax > 0, factor, 1.0)
    return Quantized((x.float() * factor).to(dtype), factor.reciprocal().view(1, 1))


def quantize_tiles(x: Tensor, tile: tuple[int, int]) -> Quantized:
    """Quantise a matrix to e4m3 with a power of two for each tile; tiles at the end may be smaller."""
    tiles, amax = _tiles(x, tile)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - E4M3_EXPONENT + (mantissa > E4M3_MANTISSA)
    scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent.clamp(-126, 127)), 1.0)
    scale = torch.where(amax.isfinite(), scale, torch.nan)  # torch converts an infinite number to 448
    return Quantized(_matrix((tiles / scale[:, None, :, None]).to(E4M3), x), scale, tile)


def quantize_nvfp4(x: Tensor, tile: tuple[int, int], amax: Tensor) -> Quantized:
    """Quantise a matrix to e2m1; a factor of the matrix makes 448 the largest e4m3 number of a scale.

    Args:
        amax: largest magnitude of the matrix, over all ranks that have a part of it.
    """
    tiles, largest = _tiles(x, tile)
    maximum = torch.finfo(torch.float32).max
    factor = torch.where(amax > 0, (E4M3_MAX * E2M1_MAX / amax).clamp(max=maximum), 1.0)
    scale = (largest * (factor / E2M1_MAX)).clamp(max=E4M3_MAX).to(E4M3).float() / factor
    values = _e2m1(tiles * scale.reciprocal().clamp(max=maximum)[:, None, :, None])
    return Quantized(_matrix(values.to(E4M3), x), scale, tile)


def _e2m1(x: Tensor) -> Tensor:
    """Round to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, or to the even one of two."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign((magnitude / step).round() * step, x)


def _tiles(x: Tensor, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Pad a matrix with zeros to whole tiles; return them as `[i, row, j, column]` and their largest magnitudes."""
    rows, columns = (-(-size // step) for size, step in zip(x.shape, tile))
    padded = x.new_zeros(rows * tile[0], columns * tile[1], dtype=torch.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    tiles = padded.view(rows, tile[0], columns, tile[1])
    return tiles, tiles.abs().amax((1, 3))


def _matrix(tiles: Tensor, like: Tensor) -> Tensor:
    """Join tiles to a matrix of the shape of another, without the padding."""
    rows, columns = like.shape
    return tiles.flatten(2).flatten(0, 1)[:rows, :columns]


NEGATIVE_SIGNS = 0b1101011111101000
"""Bit i is 1 if the rotation changes the sign of row i: Transformer Engine's constant (`get_wgrad_sign_vector`)."""


def rotated(x: Tensor) -> Tensor:
    """Multiply each block of 16 rows by a Hadamard matrix with fixed signs; the last block is padded with zeros."""
    rows = torch.arange(NVFP4_BLOCK, device=x.device)
    common = rows[:, None] & rows
    parity = common ^ (common >> 1) ^ (common >> 2) ^ (common >> 3)  # in the last bit, of the bits of common
    hadamard = (1 - 2 * ((parity ^ (NEGATIVE_SIGNS >> rows)) & 1)) / 4
    blocks, _ = _tiles(x, (NVFP4_BLOCK, x.shape[1]))
    return (hadamard @ blocks.squeeze(2)).flatten(0, 1)


Multiply = Callable[[Quantized, Quantized, torch.dtype], Tensor]
"""Multiplies quantised matrices `[M, K]` and `[K, N]`; returns `[M, N]` in a dtype."""


def emulated(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply in float32: the reference, on any device and for every kind. It is slower than a product in bf16."""
    return (a.dequantized() @ b.dequantized()).to(dtype)


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply matrices that have one scale each, with the tensor cores' FP8 instructions."""
    missing = -a.values.shape[1] % BLOCKS["tensorwise"]
    a_MK, b_NK = (_padded(values, missing) for values in (a.values, b.values.t()))
    return torch._scaled_mm(a_MK, b_NK.t(), scale_a=a.scale.view(()), scale_b=b.scale.view(()), out_dtype=dtype)


def _padded(values: Tensor, missing: int) -> Tensor:
    """Append columns of zeros, and return rows that are contiguous in memory."""
    if not missing:
        return values.contiguous()
    rows, columns = values.shape
    padded = torch.zeros(rows, columns + missing, dtype=torch.uint8, device=values.device)
    padded[:, :columns] = values.view(torch.uint8)
    return padded.view(values.dtype)


_EMULATED = Implementation[Multiply]("emulated", lambda: emulated)
PRODUCTS: dict[Fp8, Op[Multiply]] = {
    "tensorwise": Op(
        "fp8", (Implementation("scaled_mm", lambda: scaled_mm, (on_cuda, capability(9, 10, 12))), _EMULATED)
    ),
    "blockwise": Op("fp8", (_EMULATED,)),
    "mxfp8": Op("fp8", (_EMULATED,)),
    "nvfp4": Op("fp8", (_EMULATED,)),
}
"""Implementations of the products of Megatron-Core's linears. Transformer Engine's linears have their own."""

TE_CAPABILITY: dict[Fp8, tuple[int, int]] = {
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""Smallest compute capability of Transformer Engine's recipes (`check_fp8_support` and the checks next to it)."""


@dataclass(frozen=True)
class Fp8Products:
    """The quantised products of the linear layers of a model.

    Attributes:
        kind: `training.fp8`.
        group: ranks that have parts of the same matrices: of their features, or of the tokens of a micro-batch; None
            for one rank.
    """

    kind: Fp8
    multiply: Multiply = emulated
    group: Optional[Any] = None

    def amaxes(self, *matrices: Tensor) -> list[Tensor]:
        """Return the largest magnitude of each matrix over all ranks that have parts of it; none if unused."""
        if self.kind not in ("tensorwise", "nvfp4"):
            return []
        amaxes = torch.stack([x.abs().amax().float() for x in matrices])
        if self.group is not None:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=self.group)
        return list(amaxes.unbind())

    def quantize(self, x: Tensor, role: Role, summed_dim: int, amax: Optional[Tensor] = None) -> Quantized:
        """Quantise an operand of a product.

        Args:
            summed_dim: dimension of `x` that the product sums over.
            amax: from `amaxes`, for `tensorwise` and `nvfp4`.
        """
        if self.kind == "tensorwise":
            assert amax is not None
            return quantize_tensor(x, E5M2 if role == "gradient" else E4M3, amax)
        block = NVFP4_BLOCK if self.kind == "nvfp4" else BLOCKS[self.kind]
        tile = (1, block) if summed_dim == 1 else (block, 1)
        if self.kind != "mxfp8" and role == "weight":
            tile = (block, block)
        if self.kind != "nvfp4":
            return quantize_tiles(x, tile)
        if role != "weight" and summed_dim == 0:
            x = rotated(x)
            (amax,) = self.amaxes(x)
        assert amax is not None
        return quantize_nvfp4(x, tile, amax)
