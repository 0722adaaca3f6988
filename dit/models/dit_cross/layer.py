"""One block of the DiT with cross-attention."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.kernels.modulation import gated_residual
from dit.kernels.rope import Rotation
from dit.layers.adaln import Modulation
from dit.layers.attention import AttentionOptions, CrossAttention, SelfAttention
from dit.layers.mlp import MLP
from dit.layout import SequenceLayout
from dit.models.dit_cross.config import DiTCrossConfig


class DiTCrossLayer(nn.Module):
    """Self-attention, cross-attention to the text, and MLP, each behind its own modulated norm and gate.

    Source: adaLN-Zero of Peebles and Xie 2023, arXiv:2212.09748, section 3.2, with a third sub-layer between the two,
    as in NeMo's diffusion transformer: one projection of the conditioning to 9 chunks.
    """

    def __init__(self, config: DiTCrossConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        bias, eps = config.add_bias, config.layernorm_epsilon
        size, heads = config.hidden_size, config.num_attention_heads
        assert config.context_size is not None
        options: AttentionOptions = {
            "num_query_groups": config.num_query_groups,
            "bias": bias,
            "qk_layernorm": config.qk_layernorm,
            "eps": eps,
        }
        self.modulation = Modulation(size, 3, provider, bias=bias, eps=eps, rank=config.adaln_lora_rank)
        self.attention = SelfAttention(size, heads, provider, attention, **options)
        self.cross_attention = CrossAttention(size, config.context_size, heads, provider, attention, **options)
        self.mlp = MLP(size, config.ffn_size, provider, bias=bias)

    def forward(
        self,
        x_TD: Tensor,
        cond_SD: Tensor,
        context_KD: Tensor,
        layout: SequenceLayout,
        context_layout: SequenceLayout,
        rotation: Optional[Rotation] = None,
    ) -> Tensor:
        attention_mod, cross_mod, mlp_mod = self.modulation(cond_SD)
        y_TD = self.attention(attention_mod.norm_and_modulate(x_TD, layout), layout, rotation)
        x_TD = gated_residual(x_TD, y_TD, attention_mod.gate_SD, layout)
        y_TD = self.cross_attention(cross_mod.norm_and_modulate(x_TD, layout), context_KD, layout, context_layout)
        x_TD = gated_residual(x_TD, y_TD, cross_mod.gate_SD, layout)
        y_TD = self.mlp(mlp_mod.norm_and_modulate(x_TD, layout))
        return gated_residual(x_TD, y_TD, mlp_mod.gate_SD, layout)
