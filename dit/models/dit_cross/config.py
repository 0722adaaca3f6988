"""Sizes of the DiT with text cross-attention."""

from dataclasses import dataclass, replace
from typing import Optional

from dit.layout import SequenceLayout
from dit.models.activations import (
    BatchForm,
    Kept,
    SavedActivations,
    cross_attention,
    gated_sublayer,
    mlp,
    self_attention,
    text_keys,
)
from dit.models.base import TransformerSizes
from dit.models.cross_config import CrossAttentionModelConfig
from dit.models.transformer_config import Positions


@dataclass(kw_only=True)
class DiTCrossConfig(CrossAttentionModelConfig):
    """DiT whose blocks read text by cross-attention, conditioned on time, frame rate, size and class by adaLN-Zero.

    Attributes:
        add_bias: biases in attention, MLP and modulation.
        adaln_lora_rank: factor each block's modulation through this many features; None for full matrices.
        position_embedding: fixed sine-cosine over (h, w) or (t, h, w) added to the tokens, or rotary over (t, h, w).
    """

    add_bias: bool = False
    adaln_lora_rank: Optional[int] = None
    position_embedding: Positions = "sincos_3d"

    def megatron_sizes(self) -> TransformerSizes:
        return replace(super().megatron_sizes(), add_bias_linear=self.add_bias)

    def num_parameters(self) -> int:
        h, f, c, kv, bias = self.hidden_size, self.ffn_size, self.context_size or 0, self.kv_size, int(self.add_bias)
        norms = 2 * self.head_size * self.qk_layernorm
        attention = h * (h + 2 * kv) + h * h + bias * (2 * h + 2 * kv) + norms
        cross = 2 * h * h + c * 2 * kv + bias * (2 * h + 2 * kv) + norms
        mlp = 2 * h * f + bias * (f + h)
        embed = (self.token_channels + 1) * h + self.count_conditioner()
        head = 2 * h * (h + 1) + (h + 1) * self.output_features
        return embed + self.num_layers * (attention + cross + mlp + self._modulation + 9 * h * bias) + head

    @property
    def _modulation(self) -> int:
        """Weights of one block's modulation, and multiply-adds per sample."""
        h, rank = self.hidden_size, self.adaln_lora_rank
        return 9 * h * h if rank is None else h * rank + rank * 9 * h

    def nemo_weights(self) -> int:
        """Leave the text's keys and values out, as the published tables do."""
        return self.num_parameters() - self.num_layers * 2 * self.kv_size * (self.context_size or 0)

    def forward_flops(
        self, layout: SequenceLayout, context_layout: Optional[SequenceLayout] = None, *, padding: bool = False
    ) -> int:
        h, kv, samples = self.hidden_size, self.kv_size, layout.num_samples
        texts = SequenceLayout.from_lengths([1] * samples) if context_layout is None else context_layout
        rows, text_rows = (x.total_tokens if padding else x.valid_tokens for x in (layout, texts))
        pairs = sum(n * (n + k) for n, k in zip(layout.lengths, texts.lengths))
        per_row = h * (h + 2 * kv) + 3 * h * h + 2 * h * self.ffn_size
        per_text_row = 2 * kv * (self.context_size or 0)
        layer = rows * per_row + text_rows * per_text_row + 2 * pairs * h + samples * self._modulation
        embed = rows * self.token_channels * h + samples * self.conditioner_multiplications()
        head = rows * h * self.output_features + samples * 2 * h * h
        return 2 * (embed + self.num_layers * layer + head)

    def saved_activations(self, layer: int, form: BatchForm) -> SavedActivations:
        h, kv, norm = self.hidden_size, self.kv_size, self.qk_layernorm
        sublayer = gated_sublayer(h, form)
        attention = self_attention(h, kv, form, norm=norm, rotary=self.position_embedding == "rope_3d")
        cross = cross_attention(h, form, norm=norm)
        token = Kept(input=h) + sublayer + attention + sublayer + cross + sublayer + mlp(self.ffn_size)
        return SavedActivations(token, text_keys(kv, form, norm=norm))
