"""The Wan-shaped backbone on Megatron-Core linears."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.kernels.rope import Rotation
from dit.layers.adaln import LayerNorm, TableModulation
from dit.layers.attention import CrossAttention, SelfAttention
from dit.layers.mlp import MLP
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.cross_stack import SharedModulationStack, attention_options
from dit.models.wan.config import WanConfig


class WanLayer(nn.Module):
    """Modulated self-attention, cross-attention after an affine norm and without a gate, modulated MLP.

    Source: Wan Team 2025, arXiv:2503.20314, section 4.2.1 and figure 10, and its published code. Deviation: tables and
    the cross-attention's output projection are zero-initialised, so the block starts as the identity.
    """

    def __init__(self, config: WanConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        size, heads, eps = config.hidden_size, config.num_attention_heads, config.layernorm_epsilon
        options = attention_options(config)
        self.modulation = TableModulation(size, 2, provider, eps=eps)
        self.attention = SelfAttention(size, heads, provider, attention, **options)
        self.cross_norm = LayerNorm(size, provider, eps=eps)
        self.cross_attention = CrossAttention(size, size, heads, provider, attention, zero_output=True, **options)
        self.mlp = MLP(size, config.ffn_size, provider)

    def forward(
        self,
        x_TD: Tensor,
        shared_SD: Tensor,
        context_KD: Tensor,
        layout: SequenceLayout,
        context_layout: SequenceLayout,
        rotation: Optional[Rotation],
    ) -> Tensor:
        attention_mod, mlp_mod = self.modulation(shared_SD)
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, layout)
        y_TD = self.attention(y_TD, layout, rotation)
        x_TD = attention_mod.gated_residual(x_TD, y_TD, layout)
        y_TD = self.cross_attention(self.cross_norm(x_TD), context_KD, layout, context_layout)
        x_TD, y_TD = mlp_mod.residual_then_norm(x_TD, y_TD, layout)
        return mlp_mod.gated_residual(x_TD, self.mlp(y_TD), layout)


class Wan(SharedModulationStack[WanConfig]):
    """Wan 2.1's transformer: patch embedding, blocks with rotary positions, a head modulated by a table and the time.

    Source: Wan Team 2025, arXiv:2503.20314, section 4.2.1, and its published code; sizes of its text-to-video models.
    Deviations: packs of any lengths; texts have their true lengths instead of 512 tokens whose padding is attended to;
    a learned null token replaces dropped texts, unless `null_text=empty`; sine-cosine positions are an option.
    """

    fsdp_units = (WanLayer,)

    def __init__(self, config: WanConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage, lambda _: WanLayer(config, provider, attention))
