"""Memory-bound ops of a diffusion transformer, modulated per sample; the eager implementation.

Shape suffixes: T local tokens, S samples, D hidden size, F inner width of the MLP.
"""

from dataclasses import dataclass
from typing import Optional

import torch.nn.functional as F
from torch import Tensor

from dit.kernels.gelu import gelu
from dit.kernels.recompute import recomputable
from dit.layout import SequenceLayout


def broadcast_per_sample(x_SD: Tensor, layout: SequenceLayout) -> tuple[Tensor, tuple[int, ...]]:
    """Return per-sample vectors in a shape that broadcasts over tokens, and the shape in which to view the tokens.

    One sample: `[1, D]` broadcasts over `[T, D]`. Dense batch: `[S, 1, D]` broadcasts over `[S, n, D]`. Both copy
    nothing. Ragged pack: `[T, D]`, one copy per token.
    """
    if layout.num_samples == 1:
        return x_SD, (-1, x_SD.shape[-1])
    length = layout.uniform_length if layout.local_indices is None else None
    if length is None:
        return layout.per_token(x_SD), (-1, x_SD.shape[-1])
    return x_SD[:, None], (layout.num_samples, length, x_SD.shape[-1])


@recomputable
def layer_norm_modulate(x_TD: Tensor, shift_SD: Tensor, scale_SD: Tensor, layout: SequenceLayout, eps: float) -> Tensor:
    """Compute LayerNorm(x) * (1 + scale) + shift, without affine parameters (DiT, Peebles and Xie 2023, adaLN)."""
    shift, shape = broadcast_per_sample(shift_SD, layout)
    factor, _ = broadcast_per_sample(1 + scale_SD, layout)
    normed = F.layer_norm(x_TD, x_TD.shape[-1:], eps=eps).view(shape)
    return (normed * factor + shift).view_as(x_TD)


@recomputable
def rms_norm_modulate(
    x_TD: Tensor, weight_D: Tensor, shift_SD: Tensor, scale_SD: Tensor, layout: SequenceLayout, eps: float
) -> Tensor:
    """Compute RMSNorm(x) * weight * (1 + scale) + shift (adaLN on an affine RMSNorm)."""
    shift, shape = broadcast_per_sample(shift_SD, layout)
    factor, _ = broadcast_per_sample(1 + scale_SD, layout)
    normed = F.rms_norm(x_TD, x_TD.shape[-1:], weight_D, eps).view(shape)
    return (normed * factor + shift).view_as(x_TD)


def gated_residual(x_TD: Tensor, y_TD: Tensor, gate_SD: Tensor, layout: SequenceLayout) -> Tensor:
    """Compute x + gate * y with one gate per sample (adaLN-Zero)."""
    gate, shape = broadcast_per_sample(gate_SD, layout)
    return x_TD + (gate * y_TD.view(shape)).view_as(x_TD)


@dataclass(frozen=True)
class NormModulation:
    """The norm and modulation at the entry of a sub-layer.

    Attributes:
        shift_SD, scale_SD: of each sample.
        eps: of the norm.
        weight_D: of an RMS norm; None for a layer norm without affine parameters.
    """

    shift_SD: Tensor
    scale_SD: Tensor
    eps: float
    weight_D: Optional[Tensor] = None


def norm_modulate(x_TD: Tensor, into: NormModulation, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Return x, to go on as the residual, and norm(x) * (1 + scale) + shift, the input of the first sub-layer."""
    if into.weight_D is None:
        return x_TD, layer_norm_modulate(x_TD, into.shift_SD, into.scale_SD, layout, into.eps)
    return x_TD, rms_norm_modulate(x_TD, into.weight_D, into.shift_SD, into.scale_SD, layout, into.eps)


def residual(
    x_TD: Tensor, y_TD: Tensor, gate_SD: Optional[Tensor], bias_D: Optional[Tensor], layout: SequenceLayout
) -> Tensor:
    """Compute x + gate * (y + bias).

    Args:
        y_TD: output of a sub-layer's last linear.
        gate_SD: of each sample; None for 1.
        bias_D: of that linear; None if it has none, or has added it.
    """
    y_TD = y_TD if bias_D is None else y_TD + bias_D
    return x_TD + y_TD if gate_SD is None else gated_residual(x_TD, y_TD, gate_SD, layout)


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
    """Compute GELU(x + bias) in its tanh form (Hendrycks and Gimpel 2016)."""
    return gelu(x_TF if bias_F is None else x_TF + bias_F)


@recomputable
def swiglu(x_TF: Tensor, bias_F: Optional[Tensor] = None) -> Tensor:
    """Compute SiLU(gate) * up, whose features alternate in x + bias: `[T, 2 F]` becomes `[T, F]` (Shazeer 2020)."""
    x_TF = x_TF if bias_F is None else x_TF + bias_F
    gate_TF, up_TF = x_TF.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate_TF) * up_TF
