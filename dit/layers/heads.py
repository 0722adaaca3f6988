"""Output layers: from tokens to the prediction per patch."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.init import ZEROS
from dit.backends.provider import LayerProvider
from dit.kernels.modulation import layer_norm_modulate
from dit.layers.adaln import RMSNorm
from dit.layout import SequenceLayout


class FinalLayer(nn.Module):
    """A modulated norm and a linear layer to patches, both zero-initialised: the initial prediction is zero.

    Args:
        norm: an affine RMSNorm before the modulation; None for a layer norm without affine parameters.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2 ("Transformer decoder").
    """

    def __init__(
        self,
        hidden_size: int,
        out_features: int,
        provider: LayerProvider,
        *,
        eps: float = 1e-6,
        norm: Optional[RMSNorm] = None,
    ) -> None:
        super().__init__()
        self.eps, self.norm = eps, norm
        self.modulation = provider.replicated_linear(hidden_size, 2 * hidden_size, bias=True, init=ZEROS)
        self.linear = provider.replicated_linear(hidden_size, out_features, bias=True, init=ZEROS)

    def forward(self, x_TD: Tensor, cond_SD: Tensor, layout: SequenceLayout) -> Tensor:
        shift_SD, scale_SD = self.modulation(nn.functional.silu(cond_SD)).chunk(2, dim=-1)
        if self.norm is not None:
            return self.linear(self.norm.modulate(x_TD, shift_SD, scale_SD, layout))
        return self.linear(layer_norm_modulate(x_TD, shift_SD, scale_SD, layout, self.eps))


class TableFinalLayer(nn.Module):
    """As `FinalLayer`, with the modulation of adaLN-single: a learned table of shift and scale plus the conditioning.

    Source: Chen et al. 2023 (PixArt-alpha), arXiv:2310.00426, and its published code.
    """

    def __init__(self, hidden_size: int, out_features: int, provider: LayerProvider, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.table = provider.parameter((2, hidden_size), ZEROS)
        self.linear = provider.replicated_linear(hidden_size, out_features, bias=True, init=ZEROS)

    def forward(self, x_TD: Tensor, cond_SD: Tensor, layout: SequenceLayout) -> Tensor:
        shift_SD, scale_SD = (cond_SD + row_D for row_D in self.table)
        return self.linear(layer_norm_modulate(x_TD, shift_SD, scale_SD, layout, self.eps))
