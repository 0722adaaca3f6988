"""DiT with text cross-attention on Megatron-Core linears."""

from typing import Any

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.heads import FinalLayer
from dit.layers.text import TextTokens
from dit.layers.tokens import PatchEmbedding
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.dit_cross.layer import DiTCrossLayer
from dit.models.token_stack import TokenStack, cross_conditioner


class DiTCross(TokenStack[DiTCrossConfig]):
    """DiT with cross-attention: patch embedding, blocks of three sub-layers, modulated zero-initialised head.

    Source: Peebles and Xie 2023, arXiv:2212.09748; sizes and cross-attention of NeMo's diffusion collection. Deviations
    from NeMo: the head is modulated and zero-initialised, as in the paper; the conditioning vector is not normalised;
    positions are computed instead of read from a table that can alias; texts have their true lengths; a learned null
    token instead of zeros replaces dropped texts; each sample of a pack has its own time, frame rate and size.
    """

    fsdp_units = (DiTCrossLayer,)

    def __init__(self, config: DiTCrossConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage, attention)
        size = config.hidden_size
        assert config.context_size is not None
        self.conditioner = cross_conditioner(config, provider)
        self.text = TextTokens(config.context_size, provider, learned_null=config.null_text == "learned")
        if stage.first:
            self.embed = PatchEmbedding(config.input_features, size, provider)
        self.layers = nn.ModuleDict({str(i): DiTCrossLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = FinalLayer(size, config.output_features, provider, eps=config.layernorm_epsilon)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        context_KD, context_layout = self.text(batch)
        return cond_SD, context_KD, layout, context_layout, self.rotation(batch)
