"""The Wan-shaped backbone on Megatron-Core linears."""

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.adaln import SharedModulation
from dit.layers.heads import TableFinalLayer
from dit.layers.positions import add_sincos
from dit.layers.text import TextProjection, TextTokens
from dit.layers.tokens import PatchEmbedding, from_previous_stage, gather_rows, shard_rows, to_next_stage
from dit.models.base import Backbone, Stage
from dit.models.wan.config import WanConfig
from dit.models.wan.layer import WanLayer


class Wan(Backbone):
    """Wan 2.1's transformer: patch embedding, blocks with rotary positions, a head modulated by a table and the time.

    Source: Wan Team 2025, arXiv:2503.20314, section 4.2.1, and its published code; sizes of its text-to-video models.
    Deviations: packs of any lengths; a text has its true length instead of 512 tokens of which attention reads the
    padding, and a dropped one is a learned null token; sine-cosine positions are an option.
    """

    fsdp_units = (WanLayer,)

    def __init__(self, config: WanConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.model_config = config
        self.provider = provider
        size = config.hidden_size
        assert config.context_size is not None
        self.rotary = config.rotary(config.head_size) if config.position_embedding == "rope_3d" else None
        self.conditioner = config.build_conditioner(provider)
        self.modulation = SharedModulation(size, 2, provider)
        self.text = TextTokens(config.context_size, provider)
        self.text_projection = TextProjection(config.context_size, size, provider)
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict({str(i): WanLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = TableFinalLayer(size, config.output_features, provider, eps=config.layernorm_epsilon)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        # Attention gets the rows of all tensor-parallel ranks, so rotary positions are those of the rows held before.
        rotation = None if self.rotary is None else self.rotary(batch.positions_T3)
        layout, (inputs_TC, positions_T3) = shard_rows(batch.layout, self.provider, inputs_TC, batch.positions_T3)
        cond_SD = self.conditioner(time_S, batch)
        shared_SD = self.modulation(cond_SD)
        context_KC, context_layout = self.text(batch)
        context_KD = self.text_projection(context_KC)
        if self.pre_process:
            x_TD = add_sincos(self.embed(inputs_TC, layout), positions_T3, self.model_config.position_embedding)
        else:
            x_TD = from_previous_stage(self.input_tensor)
        for layer in self.layers.values():
            x_TD = layer(x_TD, shared_SD, context_KD, layout, context_layout, rotation)
        if not self.post_process:
            return to_next_stage(x_TD)
        return gather_rows(self.head(x_TD, cond_SD, layout), self.provider)
