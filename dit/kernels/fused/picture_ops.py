"""The fused picture kernels as torch operators; see `dit.kernels.fused.ops`.

Shape suffixes: N pictures, P positions per picture, C channels, B blocks of positions of all pictures.
"""

from typing import Optional

import torch
from torch import Tensor

from dit.kernels.fused.blocks import cdiv
from dit.kernels.fused.operators import operator, results_of


def _sums_of(x_NPC: Tensor, rows: int) -> Tensor:
    pictures, positions, channels = x_NPC.shape
    return x_NPC.new_empty((pictures * cdiv(positions, rows), 2, channels), dtype=torch.float32)


@operator("group_sums")
def group_sums(x_NPC: Tensor, rows: int) -> Tensor:
    """Return each channel's mean and sum of squared deviations over blocks of `rows` positions, `[B, 2, C]`."""
    from dit.kernels.fused.gpu import group_norm as gpu

    sums = _sums_of(x_NPC, rows)
    gpu.group_sums(x_NPC, rows, sums)
    return sums


@results_of("group_sums")
def _(x, rows):  # type: ignore[no-untyped-def]
    return _sums_of(x, rows)


@operator("group_factors")
def group_factors(
    sums_B2C: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale_NC: Optional[Tensor],
    shift_NC: Optional[Tensor],
    pictures: int,
    positions: int,
    groups: int,
    rows: int,
    eps: float,
) -> Tensor:
    """Return mean, factor, offset and 1 / std of each channel and picture, `[N, 4, C]`."""
    from dit.kernels.fused.gpu import group_norm as gpu

    factors = sums_B2C.new_empty((pictures, 4, sums_B2C.shape[2]))
    gpu.group_factors(sums_B2C, (weight, bias), scale_NC, shift_NC, positions, groups, rows, eps, factors)
    return factors


@results_of("group_factors")
def _(sums, weight, bias, scale, shift, pictures, positions, groups, rows, eps):  # type: ignore[no-untyped-def]
    return sums.new_empty((pictures, 4, sums.shape[2]))


@operator("norm_groups")
def norm_groups(x_NPC: Tensor, factors_N4C: Tensor, rows: int, activate: bool) -> Tensor:
    """Compute act((x - mean) factor + offset)."""
    from dit.kernels.fused.gpu import group_norm as gpu

    out = torch.empty_like(x_NPC)
    gpu.norm_groups(x_NPC, factors_N4C, rows, activate, out)
    return out


@results_of("norm_groups")
def _(x, factors, rows, activate):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@operator("group_gradient_sums")
def group_gradient_sums(grad: Tensor, x_NPC: Tensor, factors_N4C: Tensor, rows: int, activate: bool) -> Tensor:
    """Return the sums of dh and of dh times the normalised value over blocks of `rows` positions, `[B, 2, C]`."""
    from dit.kernels.fused.gpu import group_norm as gpu

    sums = _sums_of(x_NPC, rows)
    gpu.group_gradient_sums(grad, x_NPC, factors_N4C, rows, activate, sums)
    return sums


@results_of("group_gradient_sums")
def _(grad, x, factors, rows, activate):  # type: ignore[no-untyped-def]
    return _sums_of(x, rows)


@operator("group_gradients")
def group_gradients(
    sums_B2C: Tensor,
    factors_N4C: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale_NC: Optional[Tensor],
    positions: int,
    groups: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum the blocks of `group_gradient_sums`.

    Returns:
        The terms that the second pass subtracts per channel, `[N, 2, C]`; the gradients of scale and shift in `dtype`,
        empty without them; the gradients of weight and bias per picture, float32 `[N, 2, C]`.
    """
    from dit.kernels.fused.gpu import group_norm as gpu

    outputs = _gradients(factors_N4C, scale_NC, dtype)
    blocks = len(sums_B2C) // len(factors_N4C)
    gpu.group_gradients(sums_B2C, factors_N4C, (weight, bias), scale_NC, positions, groups, blocks, outputs)
    return outputs


def _gradients(factors: Tensor, scale: Optional[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pictures, _, channels = factors.shape
    small = (0,) if scale is None else (pictures, channels)
    both = pictures, 2, channels
    return (
        factors.new_empty(both),
        factors.new_empty(small, dtype=dtype),
        factors.new_empty(small, dtype=dtype),
        factors.new_empty(both),
    )


@results_of("group_gradients")
def _(sums, factors, weight, bias, scale, positions, groups, dtype):  # type: ignore[no-untyped-def]
    return _gradients(factors, scale, dtype)


@operator("norm_groups_backward")
def norm_groups_backward(
    grad: Tensor, x_NPC: Tensor, factors_N4C: Tensor, rest_N2C: Tensor, rows: int, activate: bool
) -> Tensor:
    """Return the gradient of x."""
    from dit.kernels.fused.gpu import group_norm as gpu

    out = torch.empty_like(x_NPC)
    gpu.norm_groups_backward(grad, x_NPC, factors_N4C, rest_N2C, rows, activate, out)
    return out


@results_of("norm_groups_backward")
def _(grad, x, factors, rest, rows, activate):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)
