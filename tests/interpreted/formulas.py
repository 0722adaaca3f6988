"""The operations of the fused kernels as formulas in float64, and the comparison of a kernel with its formula."""

from collections.abc import Callable, Sequence
from typing import Optional

import torch
from torch import Tensor

from dit.kernels.rope import Heads
from dit.layout import SequenceLayout

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
"""Spacing of floating-point numbers in [1, 2)."""


def residual_norm(
    layout: SequenceLayout,
    x: Tensor,
    y: Optional[Tensor],
    gate: Optional[Tensor],
    bias: Optional[Tensor],
    shift: Optional[Tensor],
    scale: Optional[Tensor],
    weight: Optional[Tensor],
    eps: float,
) -> list[Tensor]:
    """x' = x + gate (y + bias); norm(x') weight (1 + scale) + shift. RMS norm if there is a weight, else layer norm."""
    of_token = layout.segment_ids_T
    if y is not None:
        added = y if bias is None else y + bias
        x = x + (added if gate is None else gate[of_token] * added)
    if shift is None or scale is None:
        return [x]
    centred = x if weight is not None else x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    normed = normed if weight is None else normed * weight
    return [x, normed * (1 + scale[of_token]) + shift[of_token]]


def heads(
    x: Tensor,
    heads: Heads,
    weight_q: Optional[Tensor],
    weight_k: Optional[Tensor],
    eps: float,
    angles: Optional[Tensor],
    bias: Optional[Tensor] = None,
) -> list[Tensor]:
    """RMS norm of each query and key head, then rotation of its features (i, i + H / 2) as complex numbers."""
    if bias is not None:
        x = x + bias.view(x.shape[1:])
    parts = []
    for weight, first, count in ((weight_q, 0, heads.queries), (weight_k, heads.queries, int(heads.keys))):
        part = x[:, :, first : first + count].flatten(1, 2)
        if weight is not None:
            part = part / (part.square().mean(-1, keepdim=True) + eps).sqrt() * weight
        if angles is not None:
            a, b = part.chunk(2, -1)
            turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
            part = torch.cat([turned.real, turned.imag], -1)
        parts += [part] * (count > 0)
    return parts + ([x[:, :, -1]] if heads.values else [])


def gelu(x: Tensor, bias: Optional[Tensor]) -> list[Tensor]:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    x = x if bias is None else x + bias
    return [0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))]


def swiglu(x: Tensor, bias: Optional[Tensor]) -> list[Tensor]:
    """gate / (1 + exp(-gate)) * up of alternating features."""
    x = x if bias is None else x + bias
    gate, up = x[:, 0::2], x[:, 1::2]
    return [gate / (1 + torch.exp(-gate)) * up]


def geglu(x: Tensor, bias: Optional[Tensor]) -> list[Tensor]:
    """GELU(gate) * up of alternating features."""
    x = x if bias is None else x + bias
    return [gelu(x[:, 0::2], None)[0] * x[:, 1::2]]


Function = Callable[..., Sequence[Tensor]]


def run(function: Function, leaves: Sequence[Optional[Tensor]]) -> list[Tensor]:
    """Return in float64 the outputs, and the gradients of a sum of the outputs with fixed weights."""
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in leaves]
    out = function(*inputs)
    loss = torch.zeros((), dtype=torch.float64)
    for i, part in enumerate(out):
        weights = torch.linspace(-3, 4 + i, part.numel(), dtype=torch.float64).sin().view(part.shape)
        # Round the weights first, because the kernel receives its output gradients in its own precision.
        loss = loss + (part.double() * weights.to(torch.bfloat16).double()).sum()
    gradients = torch.autograd.grad(loss, [x for x in inputs if x is not None])
    return [x.detach().double() for x in (*out, *gradients)]


def check(
    kernel: Function, formula: Function, leaves: Sequence[Optional[Tensor]], dtype: torch.dtype, ulps: float
) -> None:
    """Compare a kernel's outputs and gradients with a formula; errors are in ulps of the largest number of each row."""
    rounded = [None if x is None else x.to(dtype) for x in leaves]
    got = run(kernel, rounded)
    want = run(formula, [None if x is None else x.double() for x in rounded])
    for i, (actual, exact) in enumerate(zip(got, want, strict=True)):
        assert actual.isfinite().all()
        largest = exact.abs().amax(-1, keepdim=True).clamp(min=1e-3 * float(exact.abs().max()))
        error = float(((actual - exact).abs() / largest).max()) / ULP[dtype]
        assert error <= ulps, f"result {i} of shape {tuple(exact.shape)} is off by {error:.1f} ulps"


def draws(*shapes: Optional[tuple[int, ...]]) -> list[Optional[Tensor]]:
    """Draw normal numbers, the same in every call; None for a shape of None."""
    generator = torch.Generator().manual_seed(5)
    return [None if s is None else torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
