"""Sizes of the spatial-temporal DiT."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Optional, get_args

from dit.context_parallel.segments import AttentionKind
from dit.errors import ConfigError
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
class STDiTConfig(CrossAttentionModelConfig):
    """DiT with adaLN-single whose layers attend inside samples, frames, or columns through time.

    Attributes:
        layer_pattern: the self-attentions of each layer, in order and joined by `+`, repeated over the depth:
            `["spatial", "temporal"]` alternates layers (Open-Sora), `["spatial+full+temporal"]` has all in each layer,
            `["full"]` is PixArt-alpha. Cross-attention and MLP follow in every layer.
        num_layers: whole repeats of the pattern: a "pair" of spatial and temporal layer counts as two.
        add_bias: biases in attention and MLP.
        position_embedding: fixed sine-cosine over (h, w) or (t, h, w) added to the tokens, or rotary over (t, h, w).
        position_span: fixed positions span this many indices over the height and width of every sample, whatever its
            resolution; None takes the indices as they are.
        temporal_rope: the whole head turns with the frame in temporal attention.
    """

    in_channels: int = 4
    layer_pattern: list[str] = field(default_factory=lambda: ["spatial", "temporal"])
    add_bias: bool = True
    position_embedding: Positions = "sincos_2d"
    position_span: Optional[float] = None
    temporal_rope: bool = True

    def kinds(self, layer: int) -> tuple[AttentionKind, ...]:
        """Return the self-attentions of a layer."""
        return tuple(self.layer_pattern[layer % len(self.layer_pattern)].split("+"))  # type: ignore[arg-type]

    @property
    def attentions_per_layer(self) -> int:
        return len(self.kinds(0))

    def validate(self) -> None:
        self.check_sizes()
        self._check_pattern()
        temporal = any("temporal" in self.kinds(i) for i in range(len(self.layer_pattern)))
        self.check_positions(turns_in_time=self.temporal_rope and temporal)
        if self.temporal_rope:
            self.rotary(time_only=True)
        if self.position_embedding != "rope_3d" and self.rope_factors and self.rope_factors[1:] != [1.0, 1.0]:
            raise ConfigError(
                f"model.rope_factors={self.rope_factors} has no effect along h and w with "
                f"model.position_embedding={self.position_embedding!r}, for attention through time turns with t alone; "
                "use 'rope_3d', or 1 for h and w"
            )
        if self.position_span is not None and (self.position_embedding == "rope_3d" or self.position_span <= 0):
            raise ConfigError(
                f"model.position_span={self.position_span} scales sine-cosine positions to a positive number of "
                f"indices, but position_embedding is {self.position_embedding!r}; use 'sincos_2d' or 'sincos_3d', "
                "or no span"
            )

    def _check_pattern(self) -> None:
        known = get_args(AttentionKind)
        if not self.layer_pattern or self.num_layers % len(self.layer_pattern):
            raise ConfigError(
                f"model.num_layers={self.num_layers} is not a multiple of the {len(self.layer_pattern)} layers of "
                f"model.layer_pattern={self.layer_pattern}; change one of them"
            )
        layers = [self.kinds(i) for i in range(len(self.layer_pattern))]
        for kinds in layers:
            if len(set(kinds)) != len(kinds) or not set(kinds) <= set(known):
                raise ConfigError(
                    f"model.layer_pattern has the layer {'+'.join(kinds)!r}; join some of {', '.join(known)} by '+', "
                    "each at most once"
                )
        if len({len(kinds) for kinds in layers}) > 1:
            raise ConfigError(
                f"model.layer_pattern={self.layer_pattern} has layers with {sorted({len(k) for k in layers})} "
                "self-attentions, but one modulation serves all layers; give each layer equally many"
            )

    def megatron_sizes(self) -> TransformerSizes:
        return replace(super().megatron_sizes(), add_bias_linear=self.add_bias)

    def num_parameters(self) -> int:
        h, f, c, kv, bias = self.hidden_size, self.ffn_size, self.context_size or 0, self.kv_size, int(self.add_bias)
        norms = 2 * self.head_size * self.qk_layernorm
        attention = 2 * h * h + 2 * h * kv + bias * (2 * h + 2 * kv) + norms
        mlp = 2 * h * f + bias * (f + h)
        chunks = 3 * (self.attentions_per_layer + 1) * h
        layer = (self.attentions_per_layer + 1) * attention + mlp + chunks
        text = (c + 1) * h + (h + 1) * h
        embed = (self.token_channels + 1) * h + self.count_conditioner() + text + (h + 1) * chunks
        return embed + self.num_layers * layer + 2 * h + (h + 1) * self.output_features

    def forward_flops(
        self, layout: SequenceLayout, context_layout: Optional[SequenceLayout] = None, *, padding: bool = False
    ) -> int:
        h, kv, samples, count = self.hidden_size, self.kv_size, layout.num_samples, self.attentions_per_layer
        texts = SequenceLayout.from_lengths([1] * samples) if context_layout is None else context_layout
        rows, text_rows = (x.total_tokens if padding else x.valid_tokens for x in (layout, texts))
        pairs = sum(n * (count * n + k) for n, k in zip(layout.lengths, texts.lengths))
        per_row = count * (2 * h * h + 2 * h * kv) + 2 * h * h + 2 * h * self.ffn_size
        layer = rows * per_row + text_rows * 2 * h * kv + 2 * pairs * h
        text = text_rows * ((self.context_size or 0) * h + h * h)
        per_sample = self.conditioner_multiplications() + 3 * (count + 1) * h * h
        embed = rows * self.token_channels * h + samples * per_sample + text
        return 2 * (embed + self.num_layers * layer + rows * h * self.output_features)

    def unattended_flops(self, grids: Sequence[tuple[int, int, int]]) -> int:
        repeats = self.num_layers // len(self.layer_pattern)
        kinds = [kind for i in range(len(self.layer_pattern)) for kind in self.kinds(i)] * repeats
        left_out = 0
        for t, h, w in grids:
            n = t * h * w
            pairs = {"full": n * n, "spatial": n * h * w, "temporal": n * t}
            left_out += sum(n * n - pairs[kind] for kind in kinds)
        return 4 * left_out * self.hidden_size

    def saved_activations(self, layer: int, form: BatchForm) -> SavedActivations:
        h, kv, norm = self.hidden_size, self.kv_size, self.qk_layernorm
        sublayer = gated_sublayer(h, form)
        # The cross-attention reads the tokens as they are: its input, and no norm.
        token = Kept(input=h, whole=h) + cross_attention(h, form, norm=norm) + sublayer + mlp(self.ffn_size)
        for kind in self.kinds(layer):
            rotary = self.temporal_rope if kind == "temporal" else self.position_embedding == "rope_3d"
            token += sublayer + self_attention(h, kv, form, norm=norm, rotary=rotary, reordered=kind == "temporal")
        return SavedActivations(token, text_keys(kv, form, norm=norm))

    def layer_kind(self, layer: int) -> tuple[AttentionKind, ...]:
        return self.kinds(layer)
