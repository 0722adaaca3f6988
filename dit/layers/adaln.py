"""Adaptive layer norm: shift, scale and gate per sample from the conditioning vector."""

from dataclasses import dataclass

from torch import Tensor, nn

from dit.backends.addressed_init import ZEROS
from dit.backends.fused_ops import layer_norm_modulate
from dit.backends.provider import LayerProvider
from dit.batch import SequenceLayout


@dataclass(frozen=True)
class SublayerModulation:
    """What one sub-layer takes from the conditioning: shift and scale before it, a gate after it."""

    shift_SD: Tensor
    scale_SD: Tensor
    gate_SD: Tensor
    eps: float

    def norm_and_modulate(self, x_TD: Tensor, layout: SequenceLayout) -> Tensor:
        """Return LayerNorm(x) * (1 + scale) + shift, the input of the sub-layer."""
        return layer_norm_modulate(x_TD, self.shift_SD, self.scale_SD, layout, self.eps)


class Modulation(nn.Module):
    """Linear(SiLU(c)) to shift, scale and gate of each sub-layer, zero-initialised (adaLN-Zero).

    Args:
        hidden_size: width of tokens and conditioning.
        num_sublayers: sub-layers that each get their own three chunks.
        eps: of the layer norm.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2.
    """

    def __init__(
        self, hidden_size: int, num_sublayers: int, provider: LayerProvider, *, bias: bool = True, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.num_sublayers, self.eps = num_sublayers, eps
        self.linear = provider.replicated_linear(hidden_size, 3 * num_sublayers * hidden_size, bias=bias, init=ZEROS)

    def forward(self, cond_SD: Tensor) -> list[SublayerModulation]:
        chunks = self.linear(nn.functional.silu(cond_SD)).chunk(3 * self.num_sublayers, dim=-1)
        triples = zip(chunks[0::3], chunks[1::3], chunks[2::3])
        return [SublayerModulation(shift, scale, gate, self.eps) for shift, scale, gate in triples]
