"""DiT with text cross-attention on Megatron-Core linears."""

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.heads import FinalLayer
from dit.layers.positions import add_sincos
from dit.layers.text import TextTokens
from dit.layers.tokens import PatchEmbedding, from_previous_stage, gather_rows, shard_rows, to_next_stage
from dit.models.base import Backbone, Stage
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.dit_cross.layer import DiTCrossLayer


class DiTCross(Backbone):
    """DiT with cross-attention: patch embedding, blocks of three sub-layers, modulated zero-initialised head.

    Source: Peebles and Xie 2023, arXiv:2212.09748; the sizes and the cross-attention are those of NeMo's diffusion
    collection. Deviations from NeMo: the head is modulated and starts at zero, as in the paper; the conditioning vector
    is not normalised; positions are computed instead of read from a table that can alias; the text has its true length
    and, where it is dropped, a learned null token instead of zeros; each sample of a pack has its own time, frame rate
    and size.
    """

    fsdp_units = (DiTCrossLayer,)

    def __init__(self, config: DiTCrossConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.model_config = config
        self.provider = provider
        size = config.hidden_size
        assert config.context_size is not None
        self.rotary = config.rotary(config.head_size) if config.position_embedding == "rope_3d" else None
        self.conditioner = config.build_conditioner(provider)
        self.text = TextTokens(config.context_size, provider)
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict({str(i): DiTCrossLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = FinalLayer(size, config.output_features, provider, eps=config.layernorm_epsilon)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        # Attention gets the rows of all tensor-parallel ranks, so rotary positions are those of the rows held before.
        rotation = None if self.rotary is None else self.rotary(batch.positions_T3)
        layout, (inputs_TC, positions_T3) = shard_rows(batch.layout, self.provider, inputs_TC, batch.positions_T3)
        cond_SD = self.conditioner(time_S, batch)
        context_KD, context_layout = self.text(batch)
        if self.pre_process:
            x_TD = add_sincos(self.embed(inputs_TC, layout), positions_T3, self.model_config.position_embedding)
        else:
            x_TD = from_previous_stage(self.input_tensor)
        for layer in self.layers.values():
            x_TD = layer(x_TD, cond_SD, context_KD, layout, context_layout, rotation)
        if not self.post_process:
            return to_next_stage(x_TD)
        return gather_rows(self.head(x_TD, cond_SD, layout), self.provider)
