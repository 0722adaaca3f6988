"""FLUX on Megatron-Core linears."""

import torch
from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.joint_layout import joint_layout
from dit.kernels.attention import Attention
from dit.layers.conditioner import Conditioner
from dit.layers.heads import FinalLayer
from dit.layers.positions import add_sincos
from dit.layers.text import TextTokens, text_layout
from dit.layers.tokens import (
    PatchEmbedding,
    from_previous_stage,
    gather_tokens,
    pad_tokens,
    shard_tokens,
    to_next_stage,
    unshard_tokens,
)
from dit.layout import SequenceLayout
from dit.models.base import Backbone, Stage
from dit.models.flux.config import FluxConfig
from dit.models.flux.layer import JointLayer, SingleLayer


class Flux(Backbone):
    """FLUX.1: text and image as two streams with joint attention, then as one stream; a modulated head for the image.

    The text stream is handled like the image stream: under sequence parallelism its tokens are split, and pipeline
    stages send them with the image tokens. Under context parallelism it is replicated (see `ContextAttention`).

    A dropped text keeps its length, as null tokens. Joint attention attends to all of them, so it differs from a
    missing text, which is one null token. Guidance drops texts in the same way as training. A learned vector replaces a
    missing pooled text.

    Source: black-forest-labs/flux, `model.py`; sizes and defaults of FLUX.1-dev. Deviations: packs of any lengths
    instead of texts padded to 512 tokens that are attended to; modulations, gates and head are zero-initialised; sine-
    cosine positions of the image are an option.
    """

    fsdp_units = (JointLayer, SingleLayer)

    def __init__(self, config: FluxConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.model_config = config
        self.provider = provider
        size = config.hidden_size
        assert config.context_size is not None
        rope = config.position_embedding == "rope_3d"
        self.rotary = config.rotary(config.rope_axes) if rope else None
        self.conditioner = Conditioner(
            size, provider, time_scale=config.time_scale, pooled_size=config.pooled_size, guidance=config.guidance
        )
        if stage.first:
            self.embed = PatchEmbedding(config.token_channels, size, provider)
            self.text = TextTokens(config.context_size, provider, stream=True)
            init = xavier_uniform(config.context_size, size)
            self.embed_text = provider.replicated_linear(config.context_size, size, bias=True, init=init)
        joint = config.num_joint_layers
        self.layers = nn.ModuleDict(
            {str(i): (JointLayer if i < joint else SingleLayer)(config, provider, attention) for i in stage.layers}
        )
        if stage.last:
            self.head = FinalLayer(size, config.output_features, provider, eps=config.layernorm_epsilon)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        texts, provider = pad_tokens(text_layout(batch), self.provider), self.provider
        joint = joint_layout(texts, batch.layout)
        rotation_J = None
        if self.rotary is not None:
            # Attention gets the tokens of all tensor-parallel ranks. The text is at the origin, without rotation.
            origin_K3 = batch.positions_T3.new_zeros(texts.total_tokens, 3)
            rotation_J = self.rotary(joint.join(origin_K3, batch.positions_T3))
        cond_SD = self.conditioner(time_S, batch)
        layout, (inputs_TC, positions_T3) = shard_tokens(batch.layout, provider, inputs_TC, batch.positions_T3)
        local_texts, _ = shard_tokens(texts, provider)
        local_joint, _ = shard_tokens(joint, provider)
        single = max(self.stage.layers.start, self.model_config.num_joint_layers)
        if self.stage.layers.start > self.model_config.num_joint_layers:
            x_JD = from_previous_stage(self.input_tensor)
        else:
            if self.pre_process:
                text_KD = self._embed_text(batch, texts)
                x_TD = add_sincos(self.embed(inputs_TC, layout), positions_T3, self.model_config.position_embedding)
            else:
                rows_D = from_previous_stage(self.input_tensor)
                text_KD, x_TD = rows_D.split([local_texts.num_local_tokens, layout.num_local_tokens])
            for i in range(self.stage.layers.start, min(single, self.stage.layers.stop)):
                layer = self.layers[str(i)]
                text_KD, x_TD = layer(text_KD, x_TD, cond_SD, local_texts, layout, joint, rotation_J)
            if single >= self.stage.layers.stop:
                return to_next_stage(torch.cat([text_KD, x_TD]))
            # Under sequence parallelism, tokens are redistributed over the ranks here.
            x_JD = joint.join(unshard_tokens(text_KD, provider), unshard_tokens(x_TD, provider))
            _, (x_JD,) = shard_tokens(joint, provider, x_JD)
        for i in range(single, self.stage.layers.stop):
            x_JD = self.layers[str(i)](x_JD, cond_SD, local_joint, joint, rotation_J)
        if not self.post_process:
            return to_next_stage(x_JD)
        # The head also processes the few text tokens; dropping them first would communicate wider tensors.
        out_JC = gather_tokens(self.head(x_JD, cond_SD, local_joint), provider)
        return joint.split(out_JC)[1]

    def _embed_text(self, batch: PackedBatch, texts: SequenceLayout) -> Tensor:
        """Return the local tokens of the text stream."""
        context_KC, _ = self.text(batch)
        padded_KC = nn.functional.pad(context_KC, (0, 0, 0, texts.total_tokens - len(context_KC)))
        _, (local_KC,) = shard_tokens(texts, self.provider, padded_KC)
        return self.embed_text(local_KC)
