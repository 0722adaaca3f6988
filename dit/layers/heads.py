"""Output layers, which compute the prediction of each patch."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, silu

from dit.backends.init import ZEROS, xavier_uniform
from dit.backends.provider import LayerProvider
from dit.kernels.layer_kernels import PendingResidual
from dit.kernels.modulation import NormModulation
from dit.layers.adaln import RMSNorm, SublayerModulation
from dit.layout import SequenceLayout


class FinalLayer(nn.Module):
    """A modulated norm and a linear layer to patches, both zero-initialised, so that the initial prediction is zero.

    Args:
        norm: affine RMSNorm before the modulation. Default: a layer norm without affine parameters.
        condition_size: width of the conditioning vector; None for `hidden_size`.
        shifted: modulate by shift and scale, otherwise by the scale only.
        modulated: False if `forward` receives modulations; `eps`, `condition_size` and `shifted` are then unused.

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
        condition_size: Optional[int] = None,
        shifted: bool = True,
        bias: bool = True,
        modulated: bool = True,
    ) -> None:
        super().__init__()
        self.eps, self.norm, self.kernels, self.shifted = eps, norm, provider.kernels, shifted
        self.modulation: Optional[nn.Linear] = None
        if modulated:
            rows = (2 if shifted else 1) * hidden_size
            self.modulation = provider.replicated_linear(condition_size or hidden_size, rows, bias=bias, init=ZEROS)
        self.linear = provider.replicated_linear(hidden_size, out_features, bias=bias, init=ZEROS)

    def forward(
        self,
        x_TD: Tensor | PendingResidual,
        condition: Tensor | Sequence[SublayerModulation],
        layout: SequenceLayout,
    ) -> Tensor:
        """Return the prediction of the local tokens.

        Args:
            condition: conditioning vector of each sample; if the layer is not `modulated`, modulations, the last of
                which is that of this layer.
        """
        if isinstance(condition, Tensor):
            assert self.modulation is not None
            rows = self.modulation(nn.functional.silu(condition))
            shift_SD, scale_SD = rows.chunk(2, dim=-1) if self.shifted else (torch.zeros_like(rows), rows)
            mod = SublayerModulation(shift_SD, scale_SD, None, self.eps, self.kernels)
        else:
            mod = condition[-1]
        if self.norm is not None:
            mod = self.norm.before(mod)
        return self.linear(mod.norm_modulate(x_TD, layout)[1])


class TableFinalLayer(nn.Module):
    """`FinalLayer` with the modulation of adaLN-single: a learned table of shift and scale plus the conditioning.

    Source: Chen et al. 2023 (PixArt-alpha), arXiv:2310.00426, and its published code.
    """

    def __init__(self, hidden_size: int, out_features: int, provider: LayerProvider, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.kernels = eps, provider.kernels
        self.table = provider.parameter((2, hidden_size), ZEROS)
        self.linear = provider.replicated_linear(hidden_size, out_features, bias=True, init=ZEROS)

    def forward(self, x_TD: Tensor, cond_SD: Tensor, layout: SequenceLayout) -> Tensor:
        shift_SD, scale_SD = (cond_SD + row_D for row_D in self.table)
        norm = NormModulation(shift_SD, scale_SD, self.eps)
        return self.linear(self.kernels.norm_modulate(x_TD, norm, layout.level_layout)[1])


class AlignmentHead(nn.Module):
    """Three linear layers with SiLU, replicated over tensor-parallel ranks; each rank projects its tokens.

    Source: Yu et al. 2024 (REPA), arXiv:2410.06940, and `build_mlp` of its published code.
    """

    def __init__(self, size: int, inner: int, features: int, provider: LayerProvider) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (
            provider.replicated_linear(a, b, bias=True, init=xavier_uniform(a, b))
            for a, b in ((size, inner), (inner, inner), (inner, features))
        )

    def forward(self, x_TD: Tensor, features_TF: Tensor) -> Tensor:
        """Return minus the cosine between projection and features of each local token, float32 `[T, 1]`."""
        projected_TF = self.fc3(silu(self.fc2(silu(self.fc1(x_TD)))))
        return -cosine_similarity(projected_TF.float(), features_TF.float(), dim=1)[:, None]


def with_columns(x_TD: Tensor, columns_T1: list[Tensor]) -> Tensor:
    """Append columns, in the dtype of the tokens; pipeline stages send them with the activations."""
    return torch.cat([x_TD, *(column_T1.to(x_TD.dtype) for column_T1 in columns_T1)], 1) if columns_T1 else x_TD
