"""Sizes of FLUX."""

from dataclasses import dataclass, field, replace
from typing import Literal, Optional, Self

from dit.condition_table import POOLED
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.models.activations import BatchForm, Kept, SavedActivations, gated_sublayer, mlp
from dit.models.base import TransformerSizes
from dit.models.transformer_config import CONDITION_FEATURES, TransformerModelConfig, check_unused

Positions = Literal["rope_3d", "sincos_3d"]


@dataclass(kw_only=True)
class FluxConfig(TransformerModelConfig):
    """FLUX.1: blocks in which text and image are two streams, then blocks in which they are one. The defaults are 12B.

    Attributes:
        context_size: width of the text embeddings (T5-XXL).
        pooled_size: width of the pooled text embedding (CLIP).
        num_joint_layers: blocks with two streams, and one attention over both.
        num_single_layers: blocks behind them, with one stream.
        position_embedding: rotary over (t, h, w), as in FLUX, or fixed sine-cosine over (t, h, w) added to the image's
            tokens; the text has no positions of its own.
        rope_axes: features of a head that turn with t, h and w; t of an image is 0.
        guidance: the guidance scale that a guidance-distilled network is conditioned on, the same for all samples; None
            for a network without it.
        time_scale: factor on the objective's time, and on the guidance scale, before their sinusoids.
    """

    in_channels: int = 16
    context_size: Optional[int] = 4096
    pooled_size: int = 768
    hidden_size: int = 3072
    num_attention_heads: int = 24
    num_joint_layers: int = 19
    num_single_layers: int = 38
    ffn_hidden_size: int = 12288
    position_embedding: Positions = "rope_3d"
    rope_axes: list[int] = field(default_factory=lambda: [16, 56, 56])
    guidance: Optional[float] = None

    def conditions(self) -> tuple[Condition, ...]:
        return (*super().conditions(), replace(POOLED, shape=(self.pooled_size,), dropout=self.context_dropout))

    @property
    def num_layers(self) -> int:
        """Blocks of both kinds."""
        return self.num_joint_layers + self.num_single_layers

    def validate(self) -> None:
        self.check_sizes()
        if self.context_size is None:
            raise ConfigError("model.context_size=None: FLUX reads text; give the width of its embeddings (4096)")
        if self.num_classes is not None:
            raise ConfigError(
                f"model.num_classes={self.num_classes}: FLUX is conditioned on text, not on classes; leave it None, or "
                "use the DiT backbones"
            )
        if self.ffn_hidden_size % self.num_attention_heads:
            nearest = max(1, round(self.ffn_hidden_size / self.num_attention_heads)) * self.num_attention_heads
            raise ConfigError(
                f"model.ffn_hidden_size={self.ffn_hidden_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}, with whose heads a single-stream block's MLP "
                f"is split; use {nearest}"
            )
        self.check_positions(self.rope_axes)
        if self.position_embedding != "rope_3d":
            where = f"with model.position_embedding={self.position_embedding!r}"
            check_unused(self, ["rope_axes"], where, "use 'rope_3d'")

    def megatron_sizes(self) -> TransformerSizes:
        return replace(super().megatron_sizes(), qk_layernorm=True)

    def _matrices(self) -> tuple[int, int]:
        """Return the weights that every row meets in one stream of a joint block, and in a single-stream block."""
        h, f = self.hidden_size, self.ffn_hidden_size
        return 4 * h * h + 2 * h * f, h * (3 * h + f) + (h + f) * h

    def _conditioner(self) -> int:
        """Return the weights of the conditioning vector's embedders, which every sample meets once."""
        h, sinusoids = self.hidden_size, 1 + (self.guidance is not None)
        return sinusoids * (CONDITION_FEATURES * h + h * h) + self.pooled_size * h + h * h

    def num_parameters(self) -> int:
        h, f, c, norms = self.hidden_size, self.ffn_hidden_size, self.context_size or 0, 2 * self.head_size
        stream, single = self._matrices()
        stream += 3 * h + h + f + h + norms + 6 * h * (h + 1)
        single += 3 * h + f + h + norms + 3 * h * (h + 1)
        vectors = 2 * (2 + (self.guidance is not None)) * h
        conditioner = self._conditioner() + vectors + self.pooled_size
        embed = (self.token_channels + 1) * h + (c + 1) * h + c
        head = 2 * h * (h + 1) + (h + 1) * self.output_features
        return embed + conditioner + 2 * self.num_joint_layers * stream + self.num_single_layers * single + head

    def forward_flops(
        self, layout: SequenceLayout, context_layout: Optional[SequenceLayout] = None, *, padding: bool = False
    ) -> int:
        h, samples = self.hidden_size, layout.num_samples
        texts = SequenceLayout.from_lengths([1] * samples) if context_layout is None else context_layout
        rows, text_rows = (x.total_tokens if padding else x.valid_tokens for x in (layout, texts))
        pairs = sum((n + k) ** 2 for n, k in zip(layout.lengths, texts.lengths))
        stream, single = self._matrices()
        joint_layer = (rows + text_rows) * stream + 2 * pairs * h + samples * 12 * h * h
        single_layer = (rows + text_rows) * single + 2 * pairs * h + samples * 3 * h * h
        embed = rows * self.token_channels * h + text_rows * (self.context_size or 0) * h
        # The device gives the text's rows to the head, too; nobody asks for them.
        head = (rows + text_rows * padding) * h * self.output_features + samples * 2 * h * h
        layers = self.num_joint_layers * joint_layer + self.num_single_layers * single_layer
        return 2 * (embed + samples * self._conditioner() + layers + head)

    def saved_activations(self, layer: int, form: BatchForm) -> SavedActivations:
        h, f = self.hidden_size, self.ffn_hidden_size
        sublayer = gated_sublayer(h, form)
        if layer < self.num_joint_layers:
            # Projection, joined queries, keys and values, output; each sample's output is parted into the streams,
            # which copies nothing only where there is one sample.
            attention = Kept(split=(7 + form.several) * h)
            row = Kept(input=h) + sublayer + attention + sublayer + mlp(f)
        else:
            # One projection for attention and MLP, turned queries and keys, attention's output, both outputs joined.
            row = Kept(input=h, split=(3 * h + f) + 2 * h + h + (h + f)) + sublayer
        return SavedActivations(row, row)

    def layer_kind(self, layer: int) -> bool:
        return layer < self.num_joint_layers

    def without_layers(self) -> Self:
        return replace(self, num_joint_layers=0, num_single_layers=0)
