"""Products of matrices that are quantised to 8-bit floating-point numbers (FP8).

A quantised matrix has 8-bit values and scales; `value * scale` is close to the matrix. Three kinds of scaling:

    tensorwise    one scale for the matrix: amax / 448 (e4m3), or amax / 57344 for gradients (e5m2)
    blockwise     one scale for 128 numbers along the summed dimension, or for 128 x 128 of a weight; a power of two
    mxfp8         one scale for 32 numbers along the summed dimension; a power of two (E8M0)

A linear layer y = x w^T has three products, and the summed dimension differs:

    y  = q(x) q(w)^T      sums over the input features
    dx = q(dy) q(w)       sums over the output features
    dw = q(dy)^T q(x)     sums over the tokens

Under `blockwise` and `mxfp8`, a matrix is therefore quantised twice, each time from the original numbers. A power of
two is rounded up, so that no value exceeds 448.

Sources: Transformer Engine's recipes Float8CurrentScaling with its default HYBRID format, Float8BlockScaling and
MXFP8BlockScaling (`common/recipe/__init__.py`), whose MXFP8 scale is rounded up (`cvt.rp.satfinite.ue8m0x2`); Open
Compute Project, Microscaling Formats v1.0, section 6.3, rounds it down and clips, which loses the largest numbers.

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
BLOCKS: dict[Fp8, int] = {"tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""Size of a block, or the 16 bytes that tensor cores read at once.

Ranks must not cut it: the local features of a product, and the local tokens of a sample, are a multiple of it.
"""


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
        """The transposed matrix."""
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
    rows, columns = (-(-size // step) for size, step in zip(x.shape, tile))
    padded = x.new_zeros(rows * tile[0], columns * tile[1], dtype=torch.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    tiles = padded.view(rows, tile[0], columns, tile[1])
    amax = tiles.abs().amax((1, 3))
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - E4M3_EXPONENT + (mantissa > E4M3_MANTISSA)
    scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent.clamp(-126, 127)), 1.0)
    scale = torch.where(amax.isfinite(), scale, torch.nan)  # torch converts an infinite number to 448
    values = (tiles / scale[:, None, :, None]).to(E4M3).view_as(padded)
    return Quantized(values[: x.shape[0], : x.shape[1]], scale, tile)


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
}
"""Implementations of the products of Megatron-Core's linears. Transformer Engine's linears have their own."""

TE_CAPABILITY: dict[Fp8, tuple[int, int]] = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
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
        if self.kind != "tensorwise":
            return []
        amaxes = torch.stack([x.abs().amax().float() for x in matrices])
        if self.group is not None:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=self.group)
        return list(amaxes.unbind())

    def quantize(self, x: Tensor, role: Role, summed_dim: int, amax: Optional[Tensor] = None) -> Quantized:
        """Quantise an operand of a product.

        Args:
            summed_dim: dimension of `x` that the product sums over.
            amax: from `amaxes`, for tensorwise scaling.
        """
        if amax is not None:
            return quantize_tensor(x, E5M2 if role == "gradient" else E4M3, amax)
        block = BLOCKS[self.kind]
        if self.kind == "blockwise" and role == "weight":
            return quantize_tiles(x, (block, block))
        return quantize_tiles(x, (1, block) if summed_dim == 1 else (block, 1))
