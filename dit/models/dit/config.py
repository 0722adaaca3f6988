"""Sizes of the original DiT."""

from dataclasses import dataclass, replace
from typing import Optional

from dit.layout import SequenceLayout
from dit.models.activations import BatchForm, Kept, SavedActivations, gated_sublayer, self_attention
from dit.models.base import TransformerSizes
from dit.models.expert_options import ExpertOptions
from dit.models.transformer_config import Positions, TransformerModelConfig

TIME_FEATURES = 256
"""Width of the time's sinusoid."""


@dataclass(kw_only=True)
class DiTConfig(ExpertOptions, TransformerModelConfig):
    """DiT with adaLN-Zero, conditioned on class and/or pooled text; its MLPs may be mixtures of experts.

    Attributes:
        num_layers: blocks.
        qk_layernorm: RMSNorm on queries and keys per head.
        add_bias: biases in attention, MLP and modulation.
        position_embedding: fixed sine-cosine over (h, w) as in the paper, or over (t, h, w); or rotary over (t, h, w).
        time_frequency_shift: 1 lets the sinusoid's last frequency be 1 / 10000 (DDPM, diffusers); 0 as in DiT.
    """

    num_layers: int = 12
    qk_layernorm: bool = False
    add_bias: bool = True
    position_embedding: Positions = "sincos_2d"
    time_frequency_shift: int = 0

    def validate(self) -> None:
        super().validate()
        self.validate_experts()

    def megatron_sizes(self) -> TransformerSizes:
        sizes = replace(super().megatron_sizes(), add_bias_linear=self.add_bias, qk_layernorm=self.qk_layernorm)
        return self.with_experts(sizes, self.ffn_size)

    def num_parameters(self) -> int:
        h, bias = self.hidden_size, int(self.add_bias)
        attention = 4 * h * h + 4 * h * bias + (2 * (h // self.num_attention_heads) if self.qk_layernorm else 0)
        mlp = self.mlp_parameters(h, self.ffn_size, bias=self.add_bias)
        modulation = 6 * h * (h + bias)
        embed = (self.token_channels + 1) * h + (TIME_FEATURES + 1) * h + (h + 1) * h
        if self.num_classes is not None:
            embed += (self.num_classes + 1) * h
        if self.context_size is not None:
            embed += self.context_size + (self.context_size + 1) * h + (h + 1) * h
        head = 2 * h * (h + 1) + (h + 1) * self.output_features
        return embed + self.num_layers * (attention + mlp + modulation) + head

    def forward_flops(
        self, layout: SequenceLayout, context_layout: Optional[SequenceLayout] = None, *, padding: bool = False
    ) -> int:
        h, samples = self.hidden_size, layout.num_samples
        rows = layout.total_tokens if padding else layout.valid_tokens
        mlp = self.mlp_multiply_adds(h, self.ffn_size, layout, padding=padding)
        pairs = sum(n * n for n in layout.lengths)
        layer = rows * 4 * h * h + mlp + 2 * pairs * h + samples * 6 * h * h
        embed = rows * self.token_channels * h + samples * (TIME_FEATURES + h) * h
        if self.context_size is not None:
            # The text is pooled before its first matrix product, so its length does not count.
            embed += samples * (self.context_size + h) * h
        head = rows * h * self.output_features + samples * 2 * h * h
        return 2 * (embed + self.num_layers * layer + head)

    def saved_activations(self, layer: int, form: BatchForm) -> SavedActivations:
        h, rotary = self.hidden_size, self.position_embedding == "rope_3d"
        sublayer = gated_sublayer(h, form)
        attention = self_attention(h, h, form, norm=self.qk_layernorm, rotary=rotary)
        return SavedActivations(
            Kept(input=h) + sublayer + attention + sublayer + self.mlp_saved(h, self.ffn_size, form)
        )
