"""The Wan-shaped backbone on Megatron-Core linears."""

from typing import Any

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.adaln import SharedModulation
from dit.layers.heads import TableFinalLayer
from dit.layers.text import TextProjection, TextTokens
from dit.layers.tokens import PatchEmbedding
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.token_stack import TokenStack, cross_conditioner
from dit.models.wan.config import WanConfig
from dit.models.wan.layer import WanLayer


class Wan(TokenStack[WanConfig]):
    """Wan 2.1's transformer: patch embedding, blocks with rotary positions, a head modulated by a table and the time.

    Source: Wan Team 2025, arXiv:2503.20314, section 4.2.1, and its published code; sizes of its text-to-video models.
    Deviations: packs of any lengths; texts have their true lengths instead of 512 tokens whose padding is attended to;
    a learned null token replaces dropped texts, unless `null_text=empty`; sine-cosine positions are an option.
    """

    fsdp_units = (WanLayer,)

    def __init__(self, config: WanConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage)
        size = config.hidden_size
        assert config.context_size is not None
        self.conditioner = cross_conditioner(config, provider)
        self.modulation = SharedModulation(size, 2, provider)
        self.text = TextTokens(config.context_size, provider, learned_null=config.null_text == "learned")
        self.text_projection = TextProjection(config.context_size, size, provider)
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict({str(i): WanLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = TableFinalLayer(size, config.output_features, provider, eps=config.layernorm_epsilon)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        context_KC, context_layout = self.text(batch)
        context_KD = self.text_projection(context_KC)
        return self.modulation(cond_SD), context_KD, layout, context_layout, self.rotation(batch)
