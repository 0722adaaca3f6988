"""The Movie Gen backbone on Megatron-Core linears."""

from typing import Any, Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.kernels.rope import Rotation
from dit.layers.adaln import Modulation, RMSNorm
from dit.layers.attention import CrossAttention, SelfAttention
from dit.layers.heads import FinalLayer
from dit.layers.mlp import SwiGLU
from dit.layers.moe import MoE
from dit.layers.positions import LearnedPositions
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.cross_stack import CrossStack, attention_options
from dit.models.moviegen.config import MovieGenConfig


class MovieGenLayer(nn.Module):
    """Positions, modulated self-attention, cross-attention to the text, modulated SwiGLU; each sub-layer is a residual.

    Source: Polyak et al. 2024 (Movie Gen), arXiv:2410.13720, section 3.1.2: a Llama 3 block with full attention, a
    cross-attention between self-attention and feed-forward, adaLN for the time, and the positional embedding added to
    the input of every layer. The time gates only self-attention and feed-forward. The output projection of the
    cross-attention is zero-initialised (PixArt-alpha), so the block initially only adds the positions. Deviation from
    NeMo, whose feed-forward reads the cross-attention's output instead of the normalised tokens.
    """

    def __init__(self, config: MovieGenConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layernorm_epsilon
        heads, context_size = config.num_attention_heads, config.text_size()
        options = attention_options(config, bias=False)
        self.modulation = Modulation(size, 2, provider, bias=False, eps=eps)
        self.attention_norm = RMSNorm(size, provider, eps=eps)
        self.attention = SelfAttention(size, heads, provider, attention, **options)
        self.cross_norm = RMSNorm(size, provider, eps=eps)
        self.cross_attention = CrossAttention(
            size, context_size, heads, provider, attention, zero_output=True, **options
        )
        self.mlp_norm = RMSNorm(size, provider, eps=eps)
        self.mlp: SwiGLU | MoE
        if config.num_experts is None:
            self.mlp = SwiGLU(size, config.ffn_size, provider, bias=False)
        else:
            self.mlp = MoE(size, provider, bias=False, gated=True, **config.moe_arguments())

    def forward(
        self,
        x_TD: Tensor,
        positions_TD: Optional[Tensor],
        cond_SD: Tensor,
        context_KD: Tensor,
        layout: SequenceLayout,
        context_layout: SequenceLayout,
        rotation: Optional[Rotation] = None,
    ) -> Tensor:
        attention_mod, mlp_mod = self.modulation(cond_SD)
        attention_mod, mlp_mod = self.attention_norm.before(attention_mod), self.mlp_norm.before(mlp_mod)
        if positions_TD is not None:
            x_TD = x_TD + positions_TD
        x_TD, y_TD = attention_mod.norm_modulate(x_TD, layout)
        x_TD = attention_mod.gated_residual(x_TD, self.attention(y_TD, layout, rotation), layout)
        y_TD = self.cross_attention(self.cross_norm(x_TD), context_KD, layout, context_layout)
        x_TD, y_TD = mlp_mod.residual_then_norm(x_TD, y_TD, layout)
        return mlp_mod.gated_residual(x_TD, self.mlp(y_TD, layout), layout)


class MovieGen(CrossStack[MovieGenConfig]):
    """Movie Gen's transformer: patch embedding, Llama-shaped blocks, modulated RMSNorm, zero-initialised head.

    Source: Polyak et al. 2024, arXiv:2410.13720, section 3.1.2. Deviations from the paper: one text encoder instead of
    three, without a projection; queries and keys are normalised unless `qk_layernorm=False`; sine-cosine and rotary
    positions, and conditioning on frame rate and size, are options. Deviations from NeMo: the cross-attention is a
    separate residual, every sub-layer has its own norm, queries and keys are normalised, the head is modulated, and the
    sinusoid of the time has 256 features instead of `hidden_size`.
    """

    fsdp_units = (MovieGenLayer,)

    def __init__(self, config: MovieGenConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage)
        size, eps = config.hidden_size, config.layernorm_epsilon
        learned = config.position_embedding == "learned_3d"
        self.positions = LearnedPositions(config.max_grid, size, provider) if learned else None
        self.layers = nn.ModuleDict({str(i): MovieGenLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            norm = RMSNorm(size, provider, eps=eps)
            self.head = FinalLayer(size, config.output_features, provider, eps=eps, norm=norm)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        positions_TD = None if self.positions is None else self.positions(positions_T3)
        return positions_TD, *super().layer_inputs(cond_SD, positions_T3, layout, batch)
