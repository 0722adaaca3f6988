"""The fused picture kernels as torch operators; see `dit.kernels.fused.ops`.

Shape suffixes: N pictures, P positions per picture, C channels, B blocks of positions of all pictures.
"""

from typing import Optional

import torch
from torch import Tensor

from dit.kernels.fused.blocks import cdiv
from dit.kernels.fused.operators import launched_by


def _sums_of(x_NPC: Tensor, rows: int) -> Tensor:
    pictures, positions, channels = x_NPC.shape
    return x_NPC.new_empty((pictures * cdiv(positions, rows), 2, channels), dtype=torch.float32)


@launched_by("group_norm.group_sums")
def group_sums(x_NPC: Tensor, rows: int) -> Tensor:
    """Return each channel's mean and sum of squared deviations over blocks of `rows` positions, `[B, 2, C]`."""
    return _sums_of(x_NPC, rows)


@launched_by("group_norm.group_factors")
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
    return sums_B2C.new_empty((pictures, 4, sums_B2C.shape[2]))


@launched_by("group_norm.norm_groups")
def norm_groups(x_NPC: Tensor, factors_N4C: Tensor, rows: int, activate: bool) -> Tensor:
    """Compute act((x - mean) factor + offset)."""
    return torch.empty_like(x_NPC)


@launched_by("group_norm.group_gradient_sums")
def group_gradient_sums(grad: Tensor, x_NPC: Tensor, factors_N4C: Tensor, rows: int, activate: bool) -> Tensor:
    """Return the sums of dh and of dh times the normalised value over blocks of `rows` positions, `[B, 2, C]`."""
    return _sums_of(x_NPC, rows)


@launched_by("group_norm.group_gradients")
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
    pictures, _, channels = factors_N4C.shape
    small = (0,) if scale_NC is None else (pictures, channels)
    both = pictures, 2, channels
    return (
        factors_N4C.new_empty(both),
        factors_N4C.new_empty(small, dtype=dtype),
        factors_N4C.new_empty(small, dtype=dtype),
        factors_N4C.new_empty(both),
    )


@launched_by("group_norm.norm_groups_backward")
def norm_groups_backward(
    grad: Tensor, x_NPC: Tensor, factors_N4C: Tensor, rest_N2C: Tensor, rows: int, activate: bool
) -> Tensor:
    """Return the gradient of x."""
    return torch.empty_like(x_NPC)
