"""The Movie Gen backbone on Megatron-Core linears."""

from typing import Any

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.adaln import RMSNorm
from dit.layers.heads import FinalLayer
from dit.layers.positions import LearnedPositions
from dit.layers.text import TextTokens
from dit.layers.tokens import PatchEmbedding
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.moviegen.config import MovieGenConfig
from dit.models.moviegen.layer import MovieGenLayer
from dit.models.token_stack import TokenStack, cross_conditioner


class MovieGen(TokenStack[MovieGenConfig]):
    """Movie Gen's transformer: patch embedding, Llama-shaped blocks, modulated RMSNorm, zero-initialised head.

    The learned position tables are replicated over pipeline stages, because every layer adds them; gradients are summed
    over the stages.

    Source: Polyak et al. 2024, arXiv:2410.13720, section 3.1.2. Deviations from the paper: one text encoder instead of
    three, without a projection; queries and keys are normalised unless `qk_layernorm=False`; sine-cosine and rotary
    positions, and conditioning on frame rate and size, are options. Deviations from NeMo: the cross-attention is a
    separate residual, every sub-layer has its own norm, queries and keys are normalised, and the head is modulated.
    """

    fsdp_units = (MovieGenLayer,)

    def __init__(self, config: MovieGenConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage)
        size, eps = config.hidden_size, config.layernorm_epsilon
        assert config.context_size is not None
        learned = config.position_embedding == "learned_3d"
        self.positions = LearnedPositions(config.max_grid, size, provider) if learned else None
        self.conditioner = cross_conditioner(config, provider)
        self.text = TextTokens(config.context_size, provider, learned_null=config.null_text == "learned")
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict({str(i): MovieGenLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            norm = RMSNorm(size, provider, eps=eps)
            self.head = FinalLayer(size, config.output_features, provider, eps=eps, norm=norm)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        context_KD, context_layout = self.text(batch)
        positions_TD = None
        if self.positions is not None:
            positions_TD = self.positions(positions_T3)
        return positions_TD, cond_SD, context_KD, layout, context_layout, self.rotation(batch)
