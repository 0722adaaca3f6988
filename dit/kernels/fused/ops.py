"""The fused kernels as torch operators `dit::name`, one kernel each.

An operator reads every argument once and writes every result once, so a trace on fake tensors computes its memory
traffic from arguments and results, as for any other operator.

Shape suffixes: T local tokens, S samples, D hidden size, B blocks of tokens, N heads, G groups of heads, H head size, F
inner width of the MLP. Missing gradients are empty tensors.
"""

from typing import Optional

import torch
from torch import Tensor

from dit.kernels.fused.blocks import GROUPS, ROWS_OF_TILES, Blocks, cdiv
from dit.kernels.fused.operators import operator, results_of


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


@operator("residual_norm")
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute x' = x + gate (y + bias) and norm(x') weight (1 + scale) + shift.

    Args:
        y_TD: None for x' = x, which is then not returned.
        gate_SD: None for 1.
        scale_SD: None without a norm.
        table_B3, offsets_S: `Blocks` of the tokens.
        rms: True for an RMS norm, False for a layer norm.

    Returns:
        x', the modulated tokens, mean and 1 / std of each token (float32 `[T]`); missing results are empty.
    """
    from dit.kernels.fused.gpu import residual_norm as gpu

    outputs = _residual_norm_outputs(x_TD, y_TD, scale_SD, rms)
    gpu.residual_norm(
        x_TD, y_TD, gate_SD, bias_D, shift_SD, scale_SD, weight_D, Blocks(table_B3, offsets_S), eps, rms, outputs
    )
    return outputs


def _residual_norm_outputs(
    x: Tensor, y: Optional[Tensor], scale: Optional[Tensor], rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = _empty(x) if y is None else torch.empty_like(x)
    if scale is None:
        return out, _empty(x), _empty(x), _empty(x)
    mean = _empty(x) if rms else x.new_empty(x.shape[0], dtype=torch.float32)
    return out, torch.empty_like(x), mean, x.new_empty(x.shape[0], dtype=torch.float32)


@results_of("residual_norm")
def _(x, y, gate, bias, shift, scale, weight, table, offsets, eps, rms):  # type: ignore[no-untyped-def]
    return _residual_norm_outputs(x, y, scale, rms)


@operator("residual_norm_backward")
def residual_norm_backward(
    grad_normed_TD: Optional[Tensor],
    grad_out_TD: Optional[Tensor],
    x_TD: Optional[Tensor],
    y_TD: Optional[Tensor],
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    scale_SD: Optional[Tensor],
    weight_D: Optional[Tensor],
    mean_T: Optional[Tensor],
    rstd_T: Optional[Tensor],
    table_B3: Tensor,
    offsets_S: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of x and y, and the sums of each block for `segment_sums`.

    Args:
        grad_normed_TD: None without a norm.
        grad_out_TD: None if x' is unused.
        x_TD: the residual x' of the forward pass; None without a norm, like all arguments of the norm.
        y_TD: None without a gate, because only the gradient of the gate needs it.
        mean_T: None for an RMS norm.

    Returns:
        The gradient of x (empty without a norm, because it equals that of x'), the gradient of y (empty without a gate,
        because it equals that of x), and the sums, float32 `[B, K, D]`.
    """
    from dit.kernels.fused.gpu import residual_norm as gpu

    outputs = _backward_outputs(grad_normed_TD, grad_out_TD, gate_SD, bias_D, scale_SD, table_B3)
    gpu.residual_norm_backward(
        *(grad_normed_TD, grad_out_TD, x_TD, y_TD, gate_SD, bias_D, scale_SD, weight_D, mean_T, rstd_T),
        Blocks(table_B3, offsets_S),
        outputs,
    )
    return outputs


def _backward_outputs(
    grad_normed: Optional[Tensor],
    grad_out: Optional[Tensor],
    gate: Optional[Tensor],
    bias: Optional[Tensor],
    scale: Optional[Tensor],
    table: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad_out if grad_normed is None else grad_normed
    assert grad is not None
    kinds = 2 * (scale is not None) + (gate is not None) + (bias is not None)
    return (
        _empty(grad) if scale is None else torch.empty_like(grad),
        _empty(grad) if gate is None else torch.empty_like(grad),
        grad.new_empty((table.shape[0], kinds, grad.shape[1]), dtype=torch.float32),
    )


@results_of("residual_norm_backward")
def _(grad_normed, grad_out, x, y, gate, bias, scale, weight, mean, rstd, table, offsets):  # type: ignore[no-untyped-def]
    return _backward_outputs(grad_normed, grad_out, gate, bias, scale, table)


@operator("segment_sums")
def segment_sums(
    sums_BKD: Tensor,
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    scale_SD: Optional[Tensor],
    weight_D: Optional[Tensor],
    table_B3: Tensor,
    offsets_S: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sum the blocks of `residual_norm_backward`.

    Returns:
        The gradients of shift, scale and gate, `[S, D]` in `dtype`, and of bias and weight, `[D]` in their dtypes.
    """
    from dit.kernels.fused.gpu import segment_sums as gpu

    outputs = _sums_outputs(sums_BKD, gate_SD, bias_D, scale_SD, weight_D, offsets_S, dtype)
    blocks = Blocks(table_B3, offsets_S)
    gpu.segment_sums(sums_BKD, gate_SD, bias_D, scale_SD, weight_D, blocks, outputs)
    return outputs


def _sums_outputs(
    sums: Tensor,
    gate: Optional[Tensor],
    bias: Optional[Tensor],
    scale: Optional[Tensor],
    weight: Optional[Tensor],
    offsets: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = offsets.shape[0] - 1, sums.shape[-1]

    def rows(value: Optional[Tensor]) -> Tensor:
        return sums.new_empty(0 if value is None else shape, dtype=dtype)

    def row(value: Optional[Tensor]) -> Tensor:
        return _empty(sums) if value is None else torch.empty_like(value)

    return rows(scale), rows(scale), rows(gate), row(bias), row(weight)


@results_of("segment_sums")
def _(sums, gate, bias, scale, weight, table, offsets, dtype):  # type: ignore[no-untyped-def]
    return _sums_outputs(sums, gate, bias, scale, weight, offsets, dtype)


@operator("heads")
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
    from dit.kernels.fused.gpu import heads as gpu

    outputs = _heads_outputs(x_TGMH, keys)
    gpu.heads(x_TGMH, (weight_q, weight_k), (cos, sin), eps, outputs)
    return outputs


def _heads_outputs(x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
    tokens, groups, parts, size = x.shape
    queries = parts - keys
    q = x.new_empty((tokens, groups * queries, size)) if queries else _empty(x)
    return q, x.new_empty((tokens, groups, size)) if keys else _empty(x)


@results_of("heads")
def _(x, weight_q, weight_k, cos, sin, keys, eps):  # type: ignore[no-untyped-def]
    return _heads_outputs(x, keys)


@operator("heads_backward")
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
    from dit.kernels.fused.gpu import heads as gpu

    grads = grad_q, grad_k, grad_v
    outputs = _heads_backward_outputs(*grads, x_TGMH, groups, bias)
    weights, rotation = (weight_q, weight_k), (cos, sin)
    gpu.heads_backward(grads, x_TGMH, weights, rotation, eps, ROWS_OF_TILES, bias, outputs)
    return outputs


def _heads_backward_outputs(
    grad_q: Optional[Tensor],
    grad_k: Optional[Tensor],
    grad_v: Optional[Tensor],
    x: Optional[Tensor],
    groups: int,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = next(g for g in (grad_q, grad_k, grad_v) if g is not None)
    tokens, size = grad.shape[0], grad.shape[2]
    normed = sum(g.shape[1] for g in (grad_q, grad_k) if g is not None) // groups
    parts = normed + (grad_v is not None)
    blocks = cdiv(tokens, ROWS_OF_TILES)
    return (
        grad.new_empty((tokens, groups, parts, size)),
        grad.new_empty((blocks if bias else 0, groups * parts * size), dtype=torch.float32),
        grad.new_empty((0 if x is None else blocks * cdiv(groups, GROUPS), normed * size), dtype=torch.float32),
    )


@results_of("heads_backward")
def _(grad_q, grad_k, grad_v, x, weight_q, weight_k, cos, sin, groups, eps, bias):  # type: ignore[no-untyped-def]
    return _heads_backward_outputs(grad_q, grad_k, grad_v, x, groups, bias)


@operator("column_sums")
def column_sums(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the rows of a matrix in order, in float32; return `dtype`."""
    from dit.kernels.fused.gpu import heads as gpu

    out = sums.new_empty(sums.shape[1], dtype=dtype)
    gpu.column_sums(sums, out)
    return out


@results_of("column_sums")
def _(sums, dtype):  # type: ignore[no-untyped-def]
    return sums.new_empty(sums.shape[1], dtype=dtype)


SILU, GELU = 1, 2
"""Activations of a gate, for the kernels."""


@operator("activation")
def activation(x_TF: Tensor, bias_F: Optional[Tensor], gate: int) -> Tensor:
    """Compute GELU(x + bias), or an activated gate * up with alternating features; `gate` is 0, `SILU` or `GELU`."""
    from dit.kernels.fused.gpu import activations as gpu

    out = _activation_output(x_TF, gate)
    gpu.activation(x_TF, bias_F, gate, out)
    return out


def _activation_output(x: Tensor, gate: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2 if gate else x.shape[1]))


@results_of("activation")
def _(x, bias, gate):  # type: ignore[no-untyped-def]
    return _activation_output(x, gate)


@operator("activation_backward")
def activation_backward(grad: Tensor, x_TF: Tensor, bias_F: Optional[Tensor], gate: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and a float32 matrix whose column sums are the gradient of the bias."""
    from dit.kernels.fused.gpu import activations as gpu

    outputs = _activation_backward_outputs(x_TF, bias_F)
    gpu.activation_backward(grad, x_TF, bias_F, gate, ROWS_OF_TILES, outputs)
    return outputs


def _activation_backward_outputs(x: Tensor, bias: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    blocks = 0 if bias is None else cdiv(x.shape[0], ROWS_OF_TILES)
    return torch.empty_like(x), x.new_empty((blocks, x.shape[1]), dtype=torch.float32)


@results_of("activation_backward")
def _(grad, x, bias, gate):  # type: ignore[no-untyped-def]
    return _activation_backward_outputs(x, bias)
