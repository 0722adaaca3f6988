"""The memory-bound operations of a layer as one set, either eager or fused in Triton.

A layer calls the set that `training.kernels` selects, so the layer needs no branch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Optional, Protocol

from torch import Tensor

from dit.kernels import group_norm, modulation, rope
from dit.kernels.group_norm import Groups
from dit.kernels.modulation import NormModulation
from dit.kernels.rope import HeadNorm, Heads, Rotation
from dit.layout import SequenceLayout

Activation = Callable[[Tensor, Optional[Tensor]], Tensor]


class SplitHeads(Protocol):
    """See `dit.kernels.rope.split_heads`."""

    def __call__(
        self,
        x: Tensor,
        groups: int,
        heads: Heads,
        norm: Optional[HeadNorm] = None,
        rotation: Optional[Rotation] = None,
        bias: Optional[Tensor] = None,
    ) -> list[Tensor]: ...


class NormGroups(Protocol):
    """See `dit.kernels.group_norm.norm_groups`."""

    def __call__(
        self,
        x_NCHW: Tensor,
        groups: Groups,
        scale_NC: Optional[Tensor] = None,
        shift_NC: Optional[Tensor] = None,
        *,
        activate: bool = False,
    ) -> Tensor: ...


@dataclass(frozen=True)
class LayerKernels:
    """One implementation of each operation; the eager implementations define the operations.

    Attributes:
        adds_bias: whether linears leave the addition of their bias to the next operation. The input of `split_heads`
            includes the bias, whose gradient it computes. If False, linears add their bias, except under tensor
            parallelism.
        joins_layers: whether a layer returns its last residual as a `PendingResidual`, which the first norm of the next
            layer adds in the same call.
    """

    norm_modulate: Callable[[Tensor, NormModulation, SequenceLayout], tuple[Tensor, Tensor]]
    residual: Callable[[Tensor, Tensor, Optional[Tensor], Optional[Tensor], SequenceLayout], Tensor]
    residual_norm_modulate: Callable[
        [Tensor, Tensor, Optional[Tensor], Optional[Tensor], NormModulation, SequenceLayout], tuple[Tensor, Tensor]
    ]
    split_heads: SplitHeads
    gelu_tanh: Activation
    swiglu: Activation
    geglu_tanh: Activation
    norm_groups: NormGroups
    adds_bias: bool
    joins_layers: bool


class PendingResidual(NamedTuple):
    """The sum x + gate * (y + bias) at the end of a layer, which the first norm of the next layer computes.

    Attributes:
        rows: layout with a sample for each row of `gate_SD`: the samples, or segments of one noise level.
    """

    x_TD: Tensor
    y_TD: Tensor
    gate_SD: Optional[Tensor]
    bias_D: Optional[Tensor]
    rows: SequenceLayout
    kernels: LayerKernels

    @staticmethod
    def added(x_TD: "Tensor | PendingResidual") -> Tensor:
        """Return tokens; computes the sum if it is pending."""
        if isinstance(x_TD, Tensor):
            return x_TD
        x_TD, y_TD, gate_SD, bias_D, rows, kernels = x_TD
        return kernels.residual(x_TD, y_TD, gate_SD, bias_D, rows)


EAGER = LayerKernels(
    modulation.norm_modulate,
    modulation.residual,
    modulation.residual_norm_modulate,
    rope.split_heads,
    modulation.gelu_tanh,
    modulation.swiglu,
    modulation.geglu_tanh,
    group_norm.norm_groups,
    adds_bias=False,
    joins_layers=False,
)


def fused() -> LayerKernels:
    """Return the Triton kernels, which are compiled at their first run."""
    from dit.kernels.fused import activations, group_norm, heads, residual_norm

    return LayerKernels(
        residual_norm.norm_modulate,
        residual_norm.residual,
        residual_norm.residual_norm_modulate,
        heads.split_heads,
        activations.gelu_tanh,
        activations.swiglu,
        activations.geglu_tanh,
        group_norm.norm_groups,
        adds_bias=True,
        joins_layers=True,
    )
