"""One DiT block."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.kernels.rope import Rotation
from dit.layers.adaln import Modulation
from dit.layers.attention import SelfAttention
from dit.layers.mlp import MLP
from dit.layers.moe import MoE
from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig


class DiTLayer(nn.Module):
    """Self-attention and MLP (or mixture of experts), each with a modulated norm and a gate.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2, "DiT block with adaLN-Zero".
    """

    def __init__(self, config: DiTConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        bias, eps = config.add_bias, config.layernorm_epsilon
        self.modulation = Modulation(config.hidden_size, 2, provider, bias=bias, eps=eps)
        self.attention = SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            provider,
            attention,
            bias=bias,
            qk_layernorm=config.qk_layernorm,
            eps=eps,
        )
        self.mlp: MLP | MoE
        if config.num_experts is None:
            self.mlp = MLP(config.hidden_size, config.ffn_size, provider, bias=bias)
        else:
            self.mlp = MoE(config.hidden_size, provider, bias=bias, **config.moe_arguments(config.ffn_size))

    def forward(
        self, x_TD: Tensor, cond_SD: Tensor, layout: SequenceLayout, rotation: Optional[Rotation] = None
    ) -> Tensor:
        attention_mod, mlp_mod = self.modulation(cond_SD)
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, layout)
        y_TD = self.attention(y_TD, layout, rotation)
        x_TD, y_TD = attention_mod.gated_residual_then_norm(mlp_mod, x_TD, y_TD, layout)
        return mlp_mod.gated_residual(x_TD, self.mlp(y_TD, layout), layout)
