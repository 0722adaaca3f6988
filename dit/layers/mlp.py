"""Feed-forward sub-layers, with the inner width split over tensor-parallel ranks."""

from collections.abc import Mapping
from typing import ClassVar, Optional

from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.pending_bias import PendingBias
from dit.backends.provider import LayerProvider
from dit.backends.sharding import Matrices, set_matrices
from dit.layout import SequenceLayout

GATED = Matrices(((2, 2),))
"""Gates and values of SwiGLU, which alternate."""


class MLP(nn.Module):
    """Linear, tanh-GELU, Linear (DiT)."""

    kernel: ClassVar[str] = "gelu_tanh"
    gated: ClassVar[bool] = False

    def __init__(self, hidden_size: int, ffn_hidden_size: int, provider: LayerProvider, *, bias: bool = True) -> None:
        super().__init__()
        init, inner = xavier_uniform(hidden_size, ffn_hidden_size), ffn_hidden_size * (2 if self.gated else 1)
        self.activation = getattr(provider.kernels, self.kernel)
        self.linear_fc1 = provider.column_linear(hidden_size, inner, bias=bias, init=init, returns_bias=True)
        if self.gated:
            set_matrices(self.linear_fc1, GATED)
        self.linear_fc2 = provider.row_linear(ffn_hidden_size, hidden_size, bias=bias, init=init, returns_bias=True)

    def forward(self, x_TD: Tensor, layout: Optional[SequenceLayout] = None) -> PendingBias:
        """Apply the layer to each token.

        Args:
            layout: unused, so that a block calls this layer and `MoE` in the same way.
        """
        return self.linear_fc2(self.activation(*self.linear_fc1(x_TD)))


class SwiGLU(MLP):
    """Down(SiLU(gate(x)) * up(x)).

    The output features of the fused projection alternate (gate 0, up 0, gate 1, up 1, ...), so that every
    tensor-parallel rank has complete pairs.

    Source: Shazeer 2020, arXiv:2002.05202, Eq. 6; with `bias=False` as in Llama 3 (arXiv:2407.21783).
    """

    kernel, gated = "swiglu", True


class GeGLU(SwiGLU):
    """Down(GELU(gate(x)) * up(x)), with the tanh approximation of GELU; otherwise as `SwiGLU`."""

    kernel = "geglu_tanh"


MLPS: Mapping[str, type[MLP]] = {"gelu_tanh": MLP, "swiglu": SwiGLU}
"""By the name of the activation's kernel."""
