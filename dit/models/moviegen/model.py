"""The Movie Gen backbone on Megatron-Core linears."""

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.adaln import RMSNorm
from dit.layers.heads import FinalLayer
from dit.layers.positions import LearnedPositions, add_sincos
from dit.layers.text import TextTokens
from dit.layers.tokens import PatchEmbedding, from_previous_stage, gather_rows, shard_rows, to_next_stage
from dit.models.base import Backbone, Stage
from dit.models.moviegen.config import MovieGenConfig
from dit.models.moviegen.layer import MovieGenLayer


class MovieGen(Backbone):
    """Movie Gen's transformer: patch embedding, Llama-shaped blocks, modulated RMSNorm, zero-initialised head.

    Every pipeline stage holds a copy of the learned position tables, for every layer adds them; the copies' gradients
    are summed.

    Source: Polyak et al. 2024, arXiv:2410.13720, section 3.1.2. Deviations from the paper: one text encoder instead of
    three, read without a projection; queries and keys are normalised unless `qk_layernorm=False`; sine-cosine and
    rotary positions are options; frame rate and size may join the time. From NeMo's version: the cross-attention is a
    residual of its own, every sub-layer has its own norm, queries and keys are normalised, and the head is modulated.
    """

    fsdp_units = (MovieGenLayer,)

    def __init__(self, config: MovieGenConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.model_config = config
        self.provider = provider
        size, eps = config.hidden_size, config.layernorm_epsilon
        assert config.context_size is not None
        self.rotary = config.rotary(config.head_size) if config.position_embedding == "rope_3d" else None
        learned = config.position_embedding == "learned_3d"
        self.positions = LearnedPositions(config.max_grid, size, provider) if learned else None
        self.conditioner = config.build_conditioner(provider)
        self.text = TextTokens(config.context_size, provider)
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict({str(i): MovieGenLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            norm = RMSNorm(size, provider, eps=eps)
            self.head = FinalLayer(size, config.output_features, provider, eps=eps, norm=norm)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        # Attention gets the rows of all tensor-parallel ranks, so rotary positions are those of the rows held before.
        rotation = None if self.rotary is None else self.rotary(batch.positions_T3)
        layout, (inputs_TC, positions_T3) = shard_rows(batch.layout, self.provider, inputs_TC, batch.positions_T3)
        cond_SD = self.conditioner(time_S, batch)
        context_KD, context_layout = self.text(batch)
        positions_TD = None
        if self.positions is not None:
            self.positions.check(batch.grids, batch.keys)
            positions_TD = self.positions(positions_T3)
        if self.pre_process:
            x_TD = add_sincos(self.embed(inputs_TC, layout), positions_T3, self.model_config.position_embedding)
        else:
            x_TD = from_previous_stage(self.input_tensor)
        for layer in self.layers.values():
            x_TD = layer(x_TD, positions_TD, cond_SD, context_KD, layout, context_layout, rotation)
        if not self.post_process:
            return to_next_stage(x_TD)
        return gather_rows(self.head(x_TD, cond_SD, layout), self.provider)
