"""Settings of the original DiT."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Optional

from dit.condition_table import TEACHER_TOKEN
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.models.base import Supports, TransformerSizes
from dit.models.conditioned import ClassConditioned, TextConditioned
from dit.models.expert_options import ExpertOptions
from dit.models.routing_config import TokenRouted
from dit.models.transformer_config import Activation, Positions
from dit.ranges import LAYERS, LAYERS_OR_ZERO, WIDTH, check_unused, ranged, whole

EXCLUDED = {
    "class_tokens": ("routing", "num_experts"),
    "teacher_token_size": ("num_experts",),
    "wide_head": ("class_tokens", "teacher_token_size", "num_experts", "base_width"),
    "value_residual": ("class_tokens",),
}
"""Settings that each of these settings excludes."""


@dataclass(kw_only=True)
class DiTConfig(ExpertOptions, TokenRouted, TextConditioned, ClassConditioned):
    """DiT with adaLN-Zero, conditioned on class, pooled text or both; its MLPs may be mixtures of experts.

    Attributes:
        num_layers: number of blocks.
        qk_layernorm: RMSNorm on queries and keys, per head; of SANA 1.5, over the full width.
        add_bias: use biases in the linear layers of the blocks.
        activation: of the MLPs; SwiGLU has `ffn_hidden_size` gated features.
        rms_norm: RMSNorms with weights instead of layer norms before the modulations.
        bottleneck_size: width of a linear layer between patch and embedding.
        class_tokens: `[count, first layer]`: tokens of the class that precede those of each sample from this layer on.
        teacher_token_size: width of a teacher's class token, noised and predicted as one more token
            (`objective.teacher_token_weight`).
        value_residual: mix attention values with those of the first layer, by a learned weight.
        wide_head: `[layers, width, heads]` of layers after the blocks, which read the noised latent, conditioned on the
            blocks' output.
        rope_axes: features of a head that rotate with t, h, w and, of FLUX.2, the text's index; None for a third each.
        interval_conditioning: condition on the length t - r of the interval (MeanFlow).
        time_frequency_shift: 1 sets the last frequency of the time's sinusoid to 1 / 10000 (DDPM, diffusers).
    """

    num_layers: int = ranged(12, LAYERS)
    qk_layernorm: bool = False
    add_bias: bool = True
    activation: Activation = "gelu_tanh"
    rms_norm: bool = False
    bottleneck_size: Optional[int] = ranged(None, WIDTH)
    class_tokens: Optional[list[int]] = None
    teacher_token_size: Optional[int] = ranged(None, WIDTH)
    value_residual: bool = False
    wide_head: Optional[list[int]] = ranged(None, WIDTH)
    position_embedding: Positions = "sincos_2d"
    rope_axes: Optional[list[int]] = ranged(None, LAYERS_OR_ZERO)
    time_frequency_shift: int = ranged(0, whole(0, 1))
    interval_conditioning: bool = False

    @property
    def supports(self) -> Supports:
        aligned = self.class_tokens is None
        alike = aligned and self.teacher_token_size is None
        compiled = alike and self.wide_head is None
        fixed_packs = super().supports.fixed_packs and self.teacher_token_size is None
        supports = replace(super().supports, pipeline=not self.value_residual, fixed_packs=fixed_packs)
        return replace(supports, levels=alike, split_texts=alike, aligned=aligned, compiled=compiled)

    def conditions(self) -> tuple[Condition, ...]:
        if self.teacher_token_size is None:
            return super().conditions()
        return (*super().conditions(), replace(TEACHER_TOKEN, shape=(self.teacher_token_size,)))

    def layer_kind(self, layer: int) -> Hashable:
        has_class_tokens = self.class_tokens is not None and layer >= self.class_tokens[1]
        return super().layer_kind(layer), has_class_tokens, self.value_residual and layer == 0

    def validate(self) -> None:
        super().validate()
        for name, others in EXCLUDED.items():
            if value := getattr(self, name):
                where, cure = f"with model.{name}={value}", f"leave model.{name} out"
                check_unused("model", self, others, where, cure, "is not supported")
        if (tokens := self.class_tokens) is not None:
            if self.num_classes is None:
                raise ConfigError(
                    f"model.class_tokens={tokens} needs classes; set model.num_classes, or model.class_tokens=null"
                )
            if len(tokens) != 2 or tokens[0] < 1 or not 0 <= tokens[1] < self.num_layers:
                raise ConfigError(
                    f"model.class_tokens={tokens} must be a count of at least 1 and the index of the first layer with "
                    f"these tokens, below model.num_layers={self.num_layers}, such as [32,4]"
                )
        if (head := self.wide_head) is not None:
            if len(head) != 3 or head[1] % head[2]:
                raise ConfigError(
                    f"model.wide_head={head} must be a number of layers, their width, and a number of heads that "
                    "divides it, such as [2,2048,16]"
                )
            self.head_layers().validate()
        if self.value_residual and (0 in self.middle_layers or self.num_layers == 1):
            raise ConfigError(
                "model.value_residual=True needs a first layer that has the tokens of all later layers: "
                f"model.routing={self.routing}, model.num_layers={self.num_layers}; use routing.first_layers of at "
                "least 1 and num_layers of at least 2, or value_residual=False"
            )

    @property
    def other_blocks(self) -> dict[str, TransformerSizes]:
        return {"model.wide_head": self.head_layers().megatron_sizes()} if self.wide_head else {}

    @property
    def head_sizes(self) -> frozenset[int]:
        return super().head_sizes | (self.head_layers().head_sizes if self.wide_head else frozenset())

    def head_layers(self) -> "DiTConfig":
        """Return the settings of the layers of the wide head, whose MLPs have the ratio of the others."""
        assert self.wide_head is not None
        layers, size, heads = self.wide_head
        inner = -(-self.ffn_size * size // (64 * self.hidden_size)) * 64  # other widths have slow matrix products
        axes = self.rope_axes and [features * (size // heads) // self.head_size for features in self.rope_axes]
        sizes = {"hidden_size": size, "num_attention_heads": heads, "ffn_hidden_size": inner, "rope_axes": axes}
        return replace(self, wide_head=None, value_residual=False, routing=None, lora=None, num_layers=layers, **sizes)  # type: ignore[arg-type]
