"""DiT with text cross-attention on Megatron-Core linears."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.kernels.layer_kernels import PendingResidual
from dit.kernels.rope import Rotation
from dit.layers.adaln import Modulation
from dit.layers.attention import CrossAttention, SelfAttention
from dit.layers.heads import FinalLayer
from dit.layers.mlp import MLP
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.cross_stack import CrossStack, attention_options
from dit.models.dit_cross.config import DiTCrossConfig


class DiTCrossLayer(nn.Module):
    """Self-attention, cross-attention to the text, and MLP, each with a modulated norm and a gate.

    Source: adaLN-Zero of Peebles and Xie 2023, arXiv:2212.09748, section 3.2, with a third sub-layer as in NeMo's
    diffusion transformer, which projects the conditioning to 9 chunks.
    """

    def __init__(self, config: DiTCrossConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        bias, eps = config.add_bias, config.layernorm_epsilon
        size, heads = config.hidden_size, config.num_attention_heads
        options = attention_options(config, bias=bias)
        self.modulation = Modulation(size, 3, provider, bias=bias, eps=eps, rank=config.adaln_lora_rank)
        self.attention = SelfAttention(size, heads, provider, attention, **options)
        self.cross_attention = CrossAttention(size, config.text_size(), heads, provider, attention, **options)
        self.mlp = MLP(size, config.ffn_size, provider, bias=bias)

    def forward(
        self,
        x_TD: Tensor | PendingResidual,
        cond_SD: Tensor,
        context_KD: Tensor,
        layout: SequenceLayout,
        context_layout: SequenceLayout,
        rotation: Optional[Rotation] = None,
    ) -> Tensor | PendingResidual:
        attention_mod, cross_mod, mlp_mod = self.modulation(cond_SD)
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, layout)
        y_TD = self.attention(y_TD, layout, rotation)
        x_TD, y_TD = attention_mod.gated_residual_then_norm(cross_mod, x_TD, y_TD, layout)
        y_TD = self.cross_attention(y_TD, context_KD, layout, context_layout)
        x_TD, y_TD = cross_mod.gated_residual_then_norm(mlp_mod, x_TD, y_TD, layout)
        return mlp_mod.pending_residual(x_TD, self.mlp(y_TD), layout)


class DiTCross(CrossStack[DiTCrossConfig]):
    """DiT with cross-attention: patch embedding, blocks of three sub-layers, modulated zero-initialised head.

    Source: Peebles and Xie 2023, arXiv:2212.09748; sizes and cross-attention of NeMo's diffusion collection. Deviations
    from NeMo: the head is modulated and zero-initialised, as in the paper; the conditioning vector is not normalised;
    the sinusoid of the time has 256 features instead of `hidden_size`; positions are computed instead of read from a
    table that can alias; texts have their true lengths; a learned null token instead of zeros replaces dropped texts;
    each sample of a pack has its own time, frame rate and size.
    """

    fsdp_units = (DiTCrossLayer,)

    def __init__(self, config: DiTCrossConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage, attention)
        self.layers = nn.ModuleDict({str(i): DiTCrossLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = FinalLayer(config.hidden_size, config.output_features, provider, eps=config.layernorm_epsilon)
