"""The SANA backbone on Megatron-Core linears."""

from typing import Any

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.context_parallel.pictures import Pictures
from dit.kernels.attention import Attention
from dit.layers.adaln import SharedModulation
from dit.layers.heads import TableFinalLayer
from dit.layers.text import TextProjection, TextTokens
from dit.layers.tokens import PatchEmbedding
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.sana.config import SanaConfig
from dit.models.sana.layer import NORM_EPSILON, SanaLayer
from dit.models.token_stack import TokenStack, cross_conditioner


class Sana(TokenStack[SanaConfig]):
    """SANA: patch embedding without positions, blocks with linear attention and convolution, adaLN-single.

    Source: Xie et al. 2024, arXiv:2410.10629, section 2, and its published code. Deviations: packs of pictures of any
    sizes, and clips, whose frames the convolution treats as separate pictures; texts have their true lengths; a learned
    null token replaces dropped texts, unless `null_text=empty`; tables are zero-initialised; sine-cosine positions are
    an option.
    """

    fsdp_units = (SanaLayer,)

    def __init__(self, config: SanaConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage)
        self.attention = attention
        size = config.hidden_size
        assert config.context_size is not None
        self.conditioner = cross_conditioner(config, provider)
        self.modulation = SharedModulation(size, 2, provider)
        self.text = TextTokens(config.context_size, provider, learned_null=config.null_text == "learned")
        self.text_projection = TextProjection(config.context_size, size, provider, norm_eps=NORM_EPSILON)
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict({str(i): SanaLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = TableFinalLayer(size, config.output_features, provider, eps=config.layernorm_epsilon)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        context_KC, context_layout = self.text(batch)
        context_KD = self.text_projection(context_KC)
        pictures = Pictures.of_pack(batch.layout, batch.grids, self.attention)
        return self.modulation(cond_SD), context_KD, layout, context_layout, pictures
