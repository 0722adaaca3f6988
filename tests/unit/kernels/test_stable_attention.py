"""Attention whose backward pass is stable in half precision: equal to plain attention, and without its underflow."""

import pytest
import torch
from torch import Tensor

from dit.kernels.attention import Attention, reference_attention, segment_sdpa
from dit.kernels.stable_attention import stable_attention
from dit.layout import SequenceLayout

QUERIES = SequenceLayout.from_lengths([5, 3, 5], multiple_of=4)
KEYS = SequenceLayout.from_lengths([2, 7, 2], multiple_of=3)


def gradients(attention: Attention, scale: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the output and the gradients of q, k and v for an output gradient of this scale."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(layout.total_tokens, 2, 8) for layout in (QUERIES, KEYS, KEYS)]
    given = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    out = attention(*given, QUERIES, KEYS)
    cotangent = torch.randn(out.shape, generator=generator) * scale
    out.backward(cotangent.to(dtype))
    return [out, *(x.grad / scale for x in given)]


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_stable_attention_equals_attention(scale: float) -> None:
    """Output and gradients in float32, for gradients of any size."""
    for found, exact in zip(gradients(stable_attention, scale), gradients(reference_attention, scale), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_small_gradients_do_not_vanish_in_half_precision() -> None:
    """The product of an output gradient of 1e-6 and two attention weights is below float16's smallest number, 6e-8."""
    scale, exact = 1e-6, gradients(segment_sdpa, 1.0)[1]
    stable = gradients(stable_attention, scale, torch.float16)[1]
    assert (stable.float() - exact).norm() < 0.2 * exact.norm()
