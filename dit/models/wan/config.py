"""Sizes of the Wan-shaped backbone."""

from dataclasses import dataclass, replace
from typing import Literal, Optional

from dit.layout import SequenceLayout
from dit.models.activations import (
    BatchForm,
    Kept,
    SavedActivations,
    cross_attention,
    gated_sublayer,
    mlp,
    plain_norm,
    self_attention,
    text_keys,
)
from dit.models.base import TransformerSizes
from dit.models.cross_config import CrossAttentionModelConfig

Positions = Literal["rope_3d", "sincos_3d"]


@dataclass(kw_only=True)
class WanConfig(CrossAttentionModelConfig):
    """Wan 2.1's text-to-video transformer: one modulation for all layers, norms over the whole width. Default: 1.3B.

    Classes, frame rate and size can join the time; Wan itself has none of them.

    Attributes:
        context_size: width of the text embeddings (UMT5-XXL), which are projected once for all layers.
        qk_layernorm: RMSNorm on queries and keys, over all heads together.
        position_embedding: rotary over (t, h, w), as in Wan, or fixed sine-cosine over (t, h, w) added to the tokens.
    """

    context_size: Optional[int] = 4096
    hidden_size: int = 1536
    num_layers: int = 30
    num_attention_heads: int = 12
    ffn_hidden_size: Optional[int] = 8960
    fps_conditioning: bool = False
    position_embedding: Positions = "rope_3d"

    def megatron_sizes(self) -> TransformerSizes:
        # The norms of queries and keys are split with the heads: no gradient of theirs is summed over ranks.
        return replace(super().megatron_sizes(), qk_layernorm=False)

    def num_parameters(self) -> int:
        h, f, c, kv = self.hidden_size, self.ffn_size, self.context_size or 0, self.kv_size
        norms = (h + kv) * self.qk_layernorm
        attention = (h + 1) * (h + 2 * kv) + (h + 1) * h + norms
        cross = 2 * (h + 1) * h + (h + 1) * 2 * kv + norms
        mlp = 2 * h * f + f + h
        embed = (self.token_channels + 1) * h + self.count_conditioner() + (c + 1) * h + (h + 1) * h
        head = 2 * h + (h + 1) * self.output_features
        return embed + 6 * h * (h + 1) + self.num_layers * (6 * h + attention + 2 * h + cross + mlp) + head

    def forward_flops(
        self, layout: SequenceLayout, context_layout: Optional[SequenceLayout] = None, *, padding: bool = False
    ) -> int:
        h, kv, c, samples = self.hidden_size, self.kv_size, self.context_size or 0, layout.num_samples
        texts = SequenceLayout.from_lengths([1] * samples) if context_layout is None else context_layout
        rows, text_rows = (x.total_tokens if padding else x.valid_tokens for x in (layout, texts))
        pairs = sum(n * (n + k) for n, k in zip(layout.lengths, texts.lengths))
        per_row = h * (h + 2 * kv) + 3 * h * h + 2 * h * self.ffn_size
        layer = rows * per_row + text_rows * 2 * kv * h + 2 * pairs * h
        once = samples * (self.conditioner_multiplications() + 6 * h * h) + text_rows * (c + h) * h
        ends = rows * h * (self.token_channels + self.output_features)
        return 2 * (once + ends + self.num_layers * layer)

    def saved_activations(self, layer: int, form: BatchForm) -> SavedActivations:
        h, kv, norm = self.hidden_size, self.kv_size, self.qk_layernorm
        sublayer = gated_sublayer(h, form)
        attention = self_attention(h, kv, form, norm=norm, rotary=True, full_width=True)
        cross = plain_norm(h) + cross_attention(h, form, norm=norm, full_width=True)
        token = Kept(input=h) + sublayer + attention + cross + sublayer + mlp(self.ffn_size)
        return SavedActivations(token, text_keys(kv, form, norm=norm, full_width=True))
