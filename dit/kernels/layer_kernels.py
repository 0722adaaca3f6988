"""The memory-bound operations of a transformer layer, as one set: all eager, or all fused in Triton.

A layer takes them from the set that its run selected (`training.kernels`), so that its own code has no case.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional, Protocol

from torch import Tensor

from dit.kernels import modulation, rope
from dit.kernels.modulation import NormModulation
from dit.kernels.rope import HeadNorm, Heads, Rotation
from dit.layout import SequenceLayout

Activation = Callable[[Tensor, Optional[Tensor]], Tensor]


class SplitHeads(Protocol):
    """See `dit.kernels.rope.split_heads`."""

    def __call__(
        self,
        x_TGMH: Tensor,
        heads: Heads,
        norm: Optional[HeadNorm] = None,
        rotation: Optional[Rotation] = None,
        bias: Optional[Tensor] = None,
    ) -> list[Tensor]: ...


@dataclass(frozen=True)
class LayerKernels:
    """One implementation of each operation; their eager forms say what they compute.

    Attributes:
        norm_modulate, residual, residual_norm_modulate, gelu_tanh, swiglu: see `dit.kernels.modulation`.
        split_heads: see `dit.kernels.rope`.
        sums_bias: `split_heads` computes the gradient of the projection's bias.
    """

    norm_modulate: Callable[[Tensor, NormModulation, SequenceLayout], tuple[Tensor, Tensor]]
    residual: Callable[[Tensor, Tensor, Optional[Tensor], Optional[Tensor], SequenceLayout], Tensor]
    residual_norm_modulate: Callable[
        [Tensor, Tensor, Optional[Tensor], Optional[Tensor], NormModulation, SequenceLayout], tuple[Tensor, Tensor]
    ]
    split_heads: SplitHeads
    gelu_tanh: Activation
    swiglu: Activation
    sums_bias: bool


EAGER = LayerKernels(
    modulation.norm_modulate,
    modulation.residual,
    modulation.residual_norm_modulate,
    rope.split_heads,
    modulation.gelu_tanh,
    modulation.swiglu,
    sums_bias=False,
)


def fused() -> LayerKernels:
    """Return the Triton kernels, which are compiled when they first run."""
    from dit.kernels.fused import activations, heads, residual_norm

    return LayerKernels(
        residual_norm.norm_modulate,
        residual_norm.residual,
        residual_norm.residual_norm_modulate,
        heads.split_heads,
        activations.gelu_tanh,
        activations.swiglu,
        sums_bias=True,
    )
