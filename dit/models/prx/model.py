"""The PRX backbone on Megatron-Core linears."""

from typing import Any

from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.backends.sharding import replicate_on_all_stages
from dit.batch import PackedBatch
from dit.joint_layout import joint_layout
from dit.kernels.attention import Attention
from dit.layers.conditioner import Conditioner
from dit.layers.heads import FinalLayer
from dit.layers.text import TextTokens
from dit.layers.tokens import PatchEmbedding
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.prx.config import PRXConfig
from dit.models.prx.layer import PRXLayer
from dit.models.token_stack import TokenStack


class PRX(TokenStack[PRXConfig]):
    """PRX: patch embedding, blocks whose attention reads image and text, modulated head.

    The text is projected once and replicated over tensor-, context- and pipeline-parallel ranks. A dropped text keeps
    its length, as null tokens, all of which are attended to (see `Streams`).

    Source: Photoroom 2025 (PRX), `transformer_prx.py` of diffusers. Deviations: packs of any lengths instead of padded
    texts with a mask; clips, if t has a share of `rope_axes`; the head is zero-initialised; sine-cosine
    positions are an option.
    """

    fsdp_units = (PRXLayer,)

    def __init__(self, config: PRXConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage)
        size, context_size = config.hidden_size, config.context_size
        assert context_size is not None
        if self.rotary is not None:
            self.rotary = config.rotary(config.rope_axes)
        self.conditioner = Conditioner(size, provider, time_scale=config.time_scale)
        self.text = TextTokens(context_size, provider, learned_null=config.null_text == "learned")
        # Like the null token, replicated over tensor-parallel ranks and pipeline stages.
        init = xavier_uniform(context_size, size)
        self.embed_text = provider.replicated_linear(
            context_size, size, bias=True, init=init, gradient_covers="all_tokens"
        )
        replicate_on_all_stages(self.embed_text.parameters())
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict({str(i): PRXLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = FinalLayer(size, config.output_features, provider, eps=config.layernorm_epsilon)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        context_KC, texts = self.text(batch)
        joint = joint_layout(texts, batch.layout)
        return cond_SD, self.embed_text(context_KC), layout, joint, self.rotation(batch)
