"""Sizes of the Movie Gen backbone."""

from dataclasses import dataclass, field, replace
from typing import Literal, Optional

from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.models.activations import (
    BatchForm,
    Kept,
    SavedActivations,
    cross_attention,
    gated_sublayer,
    plain_norm,
    self_attention,
    text_keys,
)
from dit.models.base import TransformerSizes
from dit.models.cross_config import CrossAttentionModelConfig
from dit.models.expert_options import ExpertOptions
from dit.models.transformer_config import check_unused

Positions = Literal["learned_3d", "sincos_3d", "rope_3d"]


@dataclass(kw_only=True)
class MovieGenConfig(ExpertOptions, CrossAttentionModelConfig):
    """A Llama-shaped diffusion transformer: RMSNorm, SwiGLU, grouped queries, no biases in its blocks.

    Its feed-forwards may be mixtures of SwiGLU experts; with expert choice this is NeMo's shape of EC-DiT.

    Attributes:
        num_query_groups: 8, as in Llama 3.
        qk_layernorm: as in the other backbones with text, and as NeMo's DiT. A deviation: neither the paper's block
            (that of Llama 3) nor NeMo's Movie Gen normalises queries and keys; False gives theirs.
        position_embedding: `learned_3d` adds three learned vectors (t, h, w) at every layer, as in the paper;
            `sincos_3d` adds fixed sine-cosine over (t, h, w) to the tokens once, `rope_3d` rotates queries and keys.
        max_grid: patches along t, h and w that the learned positions cover; larger samples are refused.
    """

    hidden_size: int = 2048
    num_layers: int = 16
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 8
    ffn_hidden_size: Optional[int] = 8192
    layernorm_epsilon: float = 1e-5
    fps_conditioning: bool = False
    position_embedding: Positions = "learned_3d"
    max_grid: list[int] = field(default_factory=lambda: [128, 120, 120])

    def validate(self) -> None:
        super().validate()
        self.validate_experts()
        if len(self.max_grid) != 3 or min(self.max_grid) < 1:
            raise ConfigError(
                f"model.max_grid={self.max_grid} must be three numbers of at least 1: the most patches along t, h and w"
            )
        if self.position_embedding != "learned_3d":
            where = f"with model.position_embedding={self.position_embedding!r}"
            check_unused(self, ["max_grid"], where, "use 'learned_3d'")

    def megatron_sizes(self) -> TransformerSizes:
        sizes = replace(super().megatron_sizes(), add_bias_linear=False)
        return self.with_experts(sizes, self.ffn_size)

    def num_parameters(self) -> int:
        h, c, kv = self.hidden_size, self.context_size or 0, self.kv_size
        mlp = self.mlp_parameters(h, self.ffn_size, bias=False, gated=True)
        norms = 2 * self.head_size * self.qk_layernorm
        attention = h * (h + 2 * kv) + h * h + norms
        cross = 2 * h * h + c * 2 * kv + norms
        layer = attention + cross + mlp + 6 * h * h + 3 * h
        positions = sum(self.max_grid) * h if self.position_embedding == "learned_3d" else 0
        embed = (self.token_channels + 1) * h + self.count_conditioner() + positions
        head = h + 2 * h * (h + 1) + (h + 1) * self.output_features
        return embed + self.num_layers * layer + head

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
        per_row = h * (h + 2 * kv) + 3 * h * h
        mlp = self.mlp_multiply_adds(h, self.ffn_size, layout, padding=padding, gated=True)
        per_text_row = 2 * kv * (self.context_size or 0)
        layer = rows * per_row + mlp + text_rows * per_text_row + 2 * pairs * h + samples * 6 * h * h
        embed = rows * self.token_channels * h + samples * self.conditioner_multiplications()
        head = rows * h * self.output_features + samples * 2 * h * h
        return 2 * (embed + self.num_layers * layer + head)

    def saved_activations(self, layer: int, form: BatchForm) -> SavedActivations:
        h, kv, norm = self.hidden_size, self.kv_size, self.qk_layernorm
        sublayer = gated_sublayer(h, form)
        attention = self_attention(h, kv, form, norm=norm, rotary=self.position_embedding == "rope_3d")
        cross = plain_norm(h) + cross_attention(h, form, norm=norm)
        mlp = self.mlp_saved(h, self.ffn_size, form, gated=True)
        token = Kept(input=h) + sublayer + attention + cross + sublayer + mlp
        return SavedActivations(token, text_keys(kv, form, norm=norm))
