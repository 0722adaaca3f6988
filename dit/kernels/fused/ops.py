"""The fused kernels as torch operators `dit::name`, one kernel each.

An operator reads every argument once and writes every result once, so a trace on fake tensors computes its memory
traffic from arguments and results, as for any other operator. The body of a function here only allocates the results,
and its docstring describes the kernel that computes them (`launched_by`).

Shape suffixes: T local tokens, S samples, D hidden size, B blocks of tokens, N heads, G groups of heads, H head size, F
inner width of the MLP. Absent arguments are None; absent results have zero elements.
"""

from typing import Optional

import torch
from torch import Tensor

from dit.kernels.fused import blocks
from dit.kernels.fused.blocks import GROUPS, cdiv
from dit.kernels.fused.operators import launched_by


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0)


@launched_by("residual_norm.residual_norm")
def residual_norm(
    x_TD: Tensor,
    y_TD: Optional[Tensor],
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    shift_SD: Optional[Tensor],
    scale_SD: Optional[Tensor],
    weight_D: Optional[Tensor],
    table_B3: Tensor,
    offsets_S: Tensor,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute x' = x + gate (y + bias) and norm(x') weight (1 + scale) + shift.

    Args:
        y_TD: None for x' = x, which is then not returned.
        gate_SD: None for 1.
        scale_SD: None without a norm.
        table_B3, offsets_S: `Blocks` of the tokens.
        rms: True for an RMS norm, False for a layer norm.

    Returns:
        x', the modulated tokens, and float32 statistics of each token, 1 / std and, of a layer norm, the mean; `[T, 2]`
        or `[T, 1]`. Missing results are empty.
    """
    out = _absent(x_TD) if y_TD is None else torch.empty_like(x_TD)
    if scale_SD is None:
        absent = _absent(x_TD)
        return out, absent, absent
    return out, torch.empty_like(x_TD), x_TD.new_empty(x_TD.shape[0], 2 - rms, dtype=torch.float32)


@launched_by("residual_norm.residual_norm_backward")
def residual_norm_backward(
    grad_normed_TD: Optional[Tensor],
    grad_out_TD: Optional[Tensor],
    x_TD: Optional[Tensor],
    y_TD: Optional[Tensor],
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    scale_SD: Optional[Tensor],
    weight_D: Optional[Tensor],
    statistics: Optional[Tensor],
    table_B3: Tensor,
    offsets_S: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of x and y, and the sums of each block for `segment_sums`.

    Args:
        grad_normed_TD: None without a norm.
        grad_out_TD: None if x' is unused.
        x_TD: the residual x' of the forward pass; None without a norm, like all arguments of the norm.
        y_TD: None without a gate, because only the gradient of the gate needs it.
        statistics: as in `residual_norm`.

    Returns:
        The gradient of x (empty without a norm, because it equals that of x'), the gradient of y (empty without a gate,
        because it equals that of x), and the sums, float32 `[B, K, D]`.
    """
    grad = grad_out_TD if grad_normed_TD is None else grad_normed_TD
    assert grad is not None
    kinds = 2 * (scale_SD is not None) + (gate_SD is not None) + (bias_D is not None)
    return (
        _absent(grad) if scale_SD is None else torch.empty_like(grad),
        _absent(grad) if gate_SD is None else torch.empty_like(grad),
        grad.new_empty(table_B3.shape[0], kinds, grad.shape[1], dtype=torch.float32),
    )


@launched_by("segment_sums.segment_sums")
def segment_sums(
    sums_BKD: Tensor,
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    scale_SD: Optional[Tensor],
    weight_D: Optional[Tensor],
    table_B3: Tensor,
    offsets_S: Tensor,
) -> list[Tensor]:
    """Sum the blocks of `residual_norm_backward`.

    Returns:
        The gradients of those that are not None of gate, bias, shift, scale and weight, with their shapes and dtypes.
    """
    return [torch.empty_like(x) for x in (gate_SD, bias_D, scale_SD, scale_SD, weight_D) if x is not None]


@launched_by("heads.heads")
def heads(
    x_TGMH: Tensor,
    weight_q: Optional[Tensor],
    weight_k: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    keys: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate the query and key heads of a projection.

    Args:
        x_TGMH: query heads of each group, then its key head if `keys`; features are contiguous.
        weight_q, weight_k: weights of the RMS norm over each head, `[H]`; None for no norm.
        cos, sin: cosine and sine of the rotation, float32 `[T, 1, H / 2]`; None for no rotation.

    Returns:
        Queries `[T, N, H]` and keys `[T, G, H]`; missing parts are empty.
    """
    tokens, groups, parts, size = x_TGMH.shape
    queries = parts - keys
    q = x_TGMH.new_empty(tokens, groups * queries, size) if queries else _absent(x_TGMH)
    return q, x_TGMH.new_empty(tokens, groups, size) if keys else _absent(x_TGMH)


@launched_by("heads.heads_backward")
def heads_backward(
    grad_q: Optional[Tensor],
    grad_k: Optional[Tensor],
    grad_v: Optional[Tensor],
    x_TGMH: Optional[Tensor],
    weight_q: Optional[Tensor],
    weight_k: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    groups: int,
    eps: float,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of a projection from the gradients of queries, keys and values.

    Args:
        grad_q, grad_k, grad_v: `[T, heads, H]` with any strides of heads and tokens; None for missing parts.
        x_TGMH: as in `heads`; None without a norm.
        bias: whether to compute the gradient of the projection's bias.

    Returns:
        The gradient of all heads `[T, G, P, H]`, and float32 matrices whose column sums are the gradients of the bias
        and of the norms' weights.
    """
    grads = [g for g in (grad_q, grad_k, grad_v) if g is not None]
    tokens, _, size = grads[0].shape
    grad_x = grads[0].new_empty(tokens, groups, sum([g.shape[1] for g in grads]) // groups, size)
    tiles = cdiv(tokens, blocks.ROWS_OF_TILES)
    rows, columns = (0, 0) if x_TGMH is None else (tiles * cdiv(groups, GROUPS), x_TGMH.shape[2] * size)
    return (
        grad_x,
        grad_x.new_empty(tiles if bias else 0, groups * grad_x.shape[2] * size, dtype=torch.float32),
        grad_x.new_empty(rows, columns, dtype=torch.float32),
    )


@launched_by("heads.column_sums")
def column_sums(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the rows of a matrix in order, in float32; return `dtype`."""
    return sums.new_empty(sums.shape[1], dtype=dtype)


SILU, GELU = 1, 2
"""Activations of a gate, for the kernels."""


@launched_by("activations.activation")
def activation(x_TF: Tensor, bias_F: Optional[Tensor], gate: int) -> Tensor:
    """Compute GELU(x + bias), or an activated gate * up with alternating features; `gate` is 0, `SILU` or `GELU`."""
    return x_TF.new_empty(x_TF.shape[0], x_TF.shape[1] // 2) if gate else torch.empty_like(x_TF)


@launched_by("activations.activation_backward")
def activation_backward(grad: Tensor, x_TF: Tensor, bias_F: Optional[Tensor], gate: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and a float32 matrix whose column sums are the gradient of the bias."""
    tiles = 0 if bias_F is None else cdiv(x_TF.shape[0], blocks.ROWS_OF_TILES)
    return torch.empty_like(x_TF), x_TF.new_empty(tiles, x_TF.shape[1], dtype=torch.float32)
