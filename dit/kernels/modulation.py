"""Memory-bound ops of a diffusion transformer, modulated per sample; the eager implementation.

Shape suffixes: T local tokens, S samples, D hidden size, F inner width of the MLP.
"""

from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dit.kernels.fused.operators import apply
from dit.kernels.recompute import recomputable
from dit.layout import SequenceLayout


def broadcast_per_sample(x_SD: Tensor, layout: SequenceLayout) -> Tensor:
    """Return per-sample vectors in a shape that broadcasts over the result of `by_sample`.

    One sample: `[1, D]` broadcasts over `[T, D]`. Dense batch: `[S, 1, D]` broadcasts over `[S, n, D]`. Both are views.
    Ragged pack: `[T, D]`, one copy per token.
    """
    if layout.kind == "ragged":
        return layout.per_token(x_SD)
    return x_SD[:, None] if layout.kind == "dense" else x_SD


def by_sample(x_TD: Tensor, like: Tensor) -> Tensor:
    """Return a view of the tokens that broadcasts with `like`, a result of `broadcast_per_sample`."""
    return x_TD.view(len(like), -1, x_TD.shape[-1]) if like.dim() == 3 else x_TD


def _tokens(x: Tensor) -> Tensor:
    """Return the result of `by_sample` as tokens again."""
    return x.flatten(0, 1) if x.dim() == 3 else x


def _sum_tokens(x: Tensor, layout: SequenceLayout) -> Tensor:
    """Sum the result of `by_sample` over the tokens of each sample: `[S, D]`."""
    if layout.kind == "ragged":
        return layout.sum_tokens(x)
    return x.sum(1) if layout.kind == "dense" else x.sum(0, keepdim=True)


class _MultiplyAdd(torch.autograd.Function):
    """added + factor * x with one factor per sample, in fewer passes and calls than separate autograd operations.

    `added` is one vector per sample if `per_sample`, else one per token. The result must not be modified in place.
    """

    @staticmethod
    def forward(
        ctx: Any, added: Tensor, factor_SD: Tensor, x_TD: Tensor, layout: SequenceLayout, per_sample: bool
    ) -> Tensor:
        ctx.layout, ctx.per_sample = layout, per_sample
        factor = broadcast_per_sample(factor_SD, layout)
        x = by_sample(x_TD, factor)
        ctx.save_for_backward(factor, x)
        added = broadcast_per_sample(added, layout) if per_sample else by_sample(added, factor)
        return _tokens(torch.addcmul(added, x, factor))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        (factor, x), layout, needs_grad = ctx.saved_tensors, ctx.layout, ctx.needs_input_grad
        grad = by_sample(grads[0], factor)
        grad_added = _sum_tokens(grad, layout) if ctx.per_sample and needs_grad[0] else grads[0]
        grad_factor = _sum_tokens(grad * x, layout) if needs_grad[1] else None
        return grad_added, grad_factor, _tokens(grad * factor) if needs_grad[2] else None, None, None


@recomputable
def _modulated_norm(
    x_TD: Tensor, shift_SD: Tensor, scale_SD: Tensor, weight_D: Optional[Tensor], layout: SequenceLayout, eps: float
) -> Tensor:
    if weight_D is None:
        normed_TD = F.layer_norm(x_TD, x_TD.shape[-1:], eps=eps)
    else:
        normed_TD = F.rms_norm(x_TD, x_TD.shape[-1:], weight_D, eps)
    out: Tensor = apply(_MultiplyAdd, shift_SD, 1 + scale_SD, normed_TD, layout, True)
    return out


class NormModulation(NamedTuple):
    """The norm and modulation before a sub-layer (DiT, Peebles and Xie 2023, adaLN).

    Attributes:
        weight_D: weight of an RMS norm; None for a layer norm without affine parameters.
    """

    shift_SD: Tensor
    scale_SD: Tensor
    eps: float
    weight_D: Optional[Tensor] = None


def norm_modulate(x_TD: Tensor, into: NormModulation, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Return x as the residual, and norm(x) * (1 + scale) + shift, the input of the first sub-layer."""
    return x_TD, _modulated_norm(x_TD, into.shift_SD, into.scale_SD, into.weight_D, layout, into.eps)


def residual(
    x_TD: Tensor, y_TD: Tensor, gate_SD: Optional[Tensor], bias_D: Optional[Tensor], layout: SequenceLayout
) -> Tensor:
    """Compute x + gate * (y + bias) with one gate per sample (adaLN-Zero).

    Args:
        bias_D: bias that the linear did not add, or None.
    """
    y_TD = y_TD if bias_D is None else y_TD + bias_D
    if gate_SD is None:
        return x_TD + y_TD
    out: Tensor = apply(_MultiplyAdd, x_TD, gate_SD, y_TD, layout, False)
    return out


def residual_norm_modulate(
    x_TD: Tensor,
    y_TD: Tensor,
    gate_SD: Optional[Tensor],
    bias_D: Optional[Tensor],
    into: NormModulation,
    layout: SequenceLayout,
) -> tuple[Tensor, Tensor]:
    """Return x' = x + gate * (y + bias), and norm(x') * (1 + scale) + shift, the input of the next sub-layer."""
    return norm_modulate(residual(x_TD, y_TD, gate_SD, bias_D, layout), into, layout)


@recomputable
def gelu_tanh(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """Compute tanh-approximated GELU(x + bias) (Hendrycks and Gimpel 2016)."""
    return F.gelu(x_TF if bias_F is None else x_TF + bias_F, approximate="tanh")


@recomputable
def swiglu(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """Compute SiLU(gate) * up, where gate and up alternate in x + bias: `[T, 2 F]` becomes `[T, F]` (Shazeer 2020)."""
    gate_TF, up_TF = _gate_and_up(x_TF, bias_F)
    return F.silu(gate_TF) * up_TF


@recomputable
def geglu_tanh(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """Compute GELU(gate) * up, with the GELU of `gelu_tanh` in the place of the SiLU of `swiglu`."""
    gate_TF, up_TF = _gate_and_up(x_TF, bias_F)
    return F.gelu(gate_TF, approximate="tanh") * up_TF


def _gate_and_up(x_TF: Tensor, bias_F: Optional[Tensor]) -> tuple[Tensor, ...]:
    x_TF = x_TF if bias_F is None else x_TF + bias_F
    return x_TF.unflatten(-1, (-1, 2)).unbind(-1)
