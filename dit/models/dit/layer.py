"""One DiT block."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.kernels.layer_kernels import PendingResidual
from dit.kernels.rope import Rotation
from dit.layers.adaln import Modulation, RMSNorm
from dit.layers.attention import SelfAttention
from dit.layers.mlp import MLPS
from dit.layers.moe import MoE
from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig


class DiTLayer(nn.Module):
    """Self-attention and MLP (or mixture of experts), each with a modulated norm and a gate.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2, "DiT block with adaLN-Zero".
    """

    def __init__(
        self,
        config: DiTConfig,
        provider: LayerProvider,
        attention: Attention,
        *,
        returns_values: bool = False,
        per_token: bool = False,
    ) -> None:
        super().__init__()
        self.returns_values = returns_values
        size, heads = config.hidden_size, config.num_attention_heads
        bias, eps = config.add_bias, config.layernorm_epsilon
        self.modulation = Modulation(size, 2, provider, bias=bias, eps=eps, per_token=per_token)
        self.attention = SelfAttention(
            size, heads, provider, attention, bias=bias, qk_layernorm=config.qk_layernorm, eps=eps
        )
        self.attention_norm: Optional[RMSNorm] = None
        self.mlp_norm: Optional[RMSNorm] = None
        if config.rms_norm:
            self.attention_norm, self.mlp_norm = (RMSNorm(size, provider, eps=eps) for _ in range(2))
        if config.num_experts is None:
            self.mlp: nn.Module = MLPS[config.activation](size, config.ffn_size, provider, bias=bias)
        else:
            gated = config.activation == "swiglu"
            self.mlp = MoE(size, provider, bias=bias, gated=gated, **config.moe_arguments())

    def forward(
        self,
        x_TD: Tensor | PendingResidual,
        cond_SD: Tensor,
        layout: SequenceLayout,
        rotation: Optional[Rotation] = None,
        first: Optional[tuple[Tensor, Tensor]] = None,
        rows: Optional[SequenceLayout] = None,
    ) -> Tensor | PendingResidual | tuple[Tensor | PendingResidual, Tensor]:
        """Apply the block.

        Args:
            first: values of the first layer and their weight, see `SelfAttention`.
            rows: layout of the rows of `cond_SD`. Default: `layout`, with a row for each sample or noise level.

        Returns:
            The tokens; with fused kernels a `PendingResidual`, from which `PendingResidual.added` computes them.
        """
        rows = layout if rows is None else rows
        attention_mod, mlp_mod = self.modulation(cond_SD)
        if self.attention_norm is not None and self.mlp_norm is not None:
            attention_mod, mlp_mod = self.attention_norm.before(attention_mod), self.mlp_norm.before(mlp_mod)
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, rows)
        y_TD = self.attention(y_TD, layout, rotation, first=first, returns_values=self.returns_values)
        if self.returns_values:
            y_TD, values_TGH = y_TD
        x_TD, y_TD = attention_mod.gated_residual_then_norm(mlp_mod, x_TD, y_TD, rows)
        out = mlp_mod.pending_residual(x_TD, self.mlp(y_TD, layout), rows)
        return (out, values_TGH) if self.returns_values else out
