"""The spatial-temporal DiT on Megatron-Core linears."""

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.context_parallel.segment_attention import place_of
from dit.kernels.attention import Attention
from dit.layers.adaln import SharedModulation
from dit.layers.heads import TableFinalLayer
from dit.layers.positions import add_sincos, spanning
from dit.layers.text import TextProjection, TextTokens
from dit.layers.tokens import PatchEmbedding, from_previous_stage, gather_rows, shard_rows, to_next_stage
from dit.models.base import Backbone, Stage
from dit.models.stdit.config import STDiTConfig
from dit.models.stdit.layer import STDiTLayer, Way


class STDiT(Backbone):
    """ST-DiT: patch embedding, blocks of spatial, temporal or full attention, zero-initialised head, adaLN-single.

    With full attention alone this is PixArt-alpha.

    Source: Zheng et al. 2024 (Open-Sora), arXiv:2412.20404, and its ST-DiT 3; Chen et al. 2023 (PixArt-alpha),
    arXiv:2310.00426. Deviations from Open-Sora: the tables of shift, scale and gate start at zero, as in adaLN-Zero; so
    does the output projection of every cross-attention, in place of all of a temporal block; `qk_layernorm` holds for
    cross-attention, too, there for self-attention alone; images and clips share a pack; a dropped text is one null
    token.
    """

    fsdp_units = (STDiTLayer,)

    def __init__(self, config: STDiTConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.model_config = config
        self.provider, self.attention = provider, attention
        size, eps = config.hidden_size, config.layernorm_epsilon
        assert config.context_size is not None
        self.rotary = config.rotary(config.head_size) if config.position_embedding == "rope_3d" else None
        self.rotary_time = config.rotary(config.head_size, time_only=True) if config.temporal_rope else self.rotary
        self.conditioner = config.build_conditioner(provider)
        self.modulation = SharedModulation(size, config.attentions_per_layer + 1, provider)
        self.text = TextTokens(config.context_size, provider)
        self.text_projection = TextProjection(config.context_size, size, provider)
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict(
            {str(i): STDiTLayer(config, config.kinds(i), provider, attention) for i in stage.layers}
        )
        if stage.last:
            self.head = TableFinalLayer(size, config.output_features, provider, eps=eps)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        ways = self._ways(batch)
        layout, (inputs_TC, positions_T3) = shard_rows(batch.layout, self.provider, inputs_TC, batch.positions_T3)
        cond_SD = self.conditioner(time_S, batch)
        shared_SD = self.modulation(cond_SD)
        context_KD, context_layout = self.text(batch)
        context_KD = self.text_projection(context_KD)
        if self.pre_process:
            span = self.model_config.position_span
            positions = positions_T3 if span is None else spanning(positions_T3, layout, batch.grids, span)
            x_TD = add_sincos(self.embed(inputs_TC, layout), positions, self.model_config.position_embedding)
        else:
            x_TD = from_previous_stage(self.input_tensor)
        for layer in self.layers.values():
            x_TD = layer(x_TD, shared_SD, context_KD, layout, context_layout, ways)
        if not self.post_process:
            return to_next_stage(x_TD)
        return gather_rows(self.head(x_TD, cond_SD, layout), self.provider)

    def _ways(self, batch: PackedBatch) -> dict[str, Way]:
        """Say for every kind of self-attention where it happens, and how its queries and keys turn."""
        shares = (self.provider.tp_rank, self.provider.tp_size) if self.provider.sequence_parallel else (0, 1)
        ways: dict[str, Way] = {}
        for kind in {kind for i in range(len(self.model_config.layer_pattern)) for kind in self.model_config.kinds(i)}:
            place = place_of(kind, self.attention, batch.layout, batch.grids, *shares)
            rotary = self.rotary_time if kind == "temporal" else self.rotary
            # Attention gets the rows of all tensor-parallel ranks, so these are the positions before rows are shared.
            positions_T3 = batch.positions_T3 if place.positions_T3 is None else place.positions_T3
            ways[kind] = Way(place, None if rotary is None else rotary(positions_T3))
        return ways
