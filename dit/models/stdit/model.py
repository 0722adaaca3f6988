"""The spatial-temporal DiT on Megatron-Core linears."""

from collections.abc import Mapping
from typing import Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.context_parallel.segment_attention import SegmentAttentionPlan, plan_segment_attention
from dit.context_parallel.segments import AttentionKind
from dit.kernels.attention import Attention
from dit.kernels.rope import Rotation
from dit.layers.adaln import TableModulation
from dit.layers.attention import CrossAttention, SelfAttention
from dit.layers.mlp import MLP
from dit.layers.positions import spanning
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.cross_stack import SharedModulationStack, attention_options
from dit.models.stdit.config import STDiTConfig

AttentionPlan = tuple[SegmentAttentionPlan, Optional[Rotation]]
"""One kind of self-attention in this step, and the rotary positions of the tokens after its exchange."""


class STDiTLayer(nn.Module):
    """One or more modulated self-attentions, cross-attention to the text, modulated MLP; each sub-layer is a residual.

    The conditioning gates self-attention and MLP. The cross-attention has no norm and no gate, and its output
    projection is zero-initialised.

    Source: Chen et al. 2023 (PixArt-alpha), arXiv:2310.00426, section 2.3 (adaLN-single, cross-attention); Zheng et al.
    2024 (Open-Sora), arXiv:2412.20404 (spatial and temporal layers).
    """

    def __init__(
        self, config: STDiTConfig, kinds: tuple[AttentionKind, ...], provider: LayerProvider, attention: Attention
    ) -> None:
        super().__init__()
        size, heads, eps = config.hidden_size, config.num_attention_heads, config.layernorm_epsilon
        options = attention_options(config, bias=config.add_bias)
        self.modulation = TableModulation(size, len(kinds) + 1, provider, eps=eps)
        self.attentions = nn.ModuleDict(
            {kind: SelfAttention(size, heads, provider, attention, **options) for kind in kinds}
        )
        self.cross_attention = CrossAttention(size, size, heads, provider, attention, zero_output=True, **options)
        self.mlp = MLP(size, config.ffn_size, provider, bias=config.add_bias)

    def forward(
        self,
        x_TD: Tensor,
        shared_SD: Tensor,
        context_KD: Tensor,
        layout: SequenceLayout,
        context_layout: SequenceLayout,
        plans: Mapping[str, AttentionPlan],
    ) -> Tensor:
        *attention_mods, mlp_mod = self.modulation(shared_SD)
        for (kind, attention), mod in zip(self.attentions.items(), attention_mods):
            segments, rotation = plans[kind]
            x_TD, y_TD = mod.norm_modulate(x_TD, layout)
            y_TD = attention(segments.dispatch(y_TD), layout, rotation, attend=segments.attend)
            x_TD = mod.gated_residual(x_TD, y_TD.map(segments.combine), layout)
        y_TD = self.cross_attention(x_TD, context_KD, layout, context_layout)
        x_TD, y_TD = mlp_mod.residual_then_norm(x_TD, y_TD, layout)
        return mlp_mod.gated_residual(x_TD, self.mlp(y_TD), layout)


class STDiT(SharedModulationStack[STDiTConfig]):
    """ST-DiT: patch embedding, blocks of spatial, temporal or full attention, zero-initialised head, adaLN-single.

    With only full attention, this is PixArt-alpha.

    Source: Zheng et al. 2024 (Open-Sora), arXiv:2412.20404, and its ST-DiT 3; Chen et al. 2023 (PixArt-alpha),
    arXiv:2310.00426. Deviations from Open-Sora: the tables of shift, scale and gate are zero-initialised, as in
    adaLN-Zero; so are the output projections of all cross-attentions, instead of all output projections of temporal
    blocks; `qk_layernorm` also applies to cross-attention; images and clips share a pack; a learned null token replaces
    dropped texts, unless `null_text=empty`.
    """

    fsdp_units = (STDiTLayer,)

    def __init__(self, config: STDiTConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(
            config,
            provider,
            stage,
            lambda layer: STDiTLayer(config, config.kinds(layer), provider, attention),
            num_sublayers=len(config.kinds(0)) + 1,
        )
        self.attention = attention
        self.rotary_time = config.rotary(time_only=True) if config.has_temporal else self.rotary

    def fixed_positions(self, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch) -> Tensor:
        span = self.model_config.position_span
        return positions_T3 if span is None else spanning(positions_T3, layout, batch.grid_sizes(), span)

    def attention_input(self, batch: PackedBatch) -> dict[str, AttentionPlan]:
        """Plan every kind of self-attention: its exchange of tokens and its rotary positions."""
        tensor_ranks = (self.provider.tp_rank, self.provider.tp_size) if self.provider.sequence_parallel else (0, 1)
        plans: dict[str, AttentionPlan] = {}
        for kind in {kind for i in range(len(self.model_config.layer_pattern)) for kind in self.model_config.kinds(i)}:
            segments = plan_segment_attention(kind, self.attention, batch, *tensor_ranks)
            rotary = self.rotary_time if kind == "temporal" else self.rotary
            # Attention gets the tokens of all tensor-parallel ranks, so these positions are not split.
            positions_T3 = batch.positions_T3 if segments.positions_T3 is None else segments.positions_T3
            plans[kind] = segments, None if rotary is None else rotary(positions_T3)
        return plans
