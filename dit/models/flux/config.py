"""Sizes of FLUX."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Optional

from dit.condition_table import POOLED
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.models.base import Supports, TransformerSizes
from dit.models.conditioned import WITHOUT_CLASSES, TextConditioned
from dit.models.transformer_config import TransformerModelConfig
from dit.ranges import check_unused

Positions = Literal["rope_3d", "sincos_3d"]


@dataclass(kw_only=True)
class FluxConfig(TransformerModelConfig, TextConditioned):
    """FLUX.1: blocks with text and image as two streams, then blocks with one stream. The defaults are the 12B model.

    The text (T5-XXL) has no positions, and t of an image is 0.

    Attributes:
        pooled_size: width of the pooled text embedding (CLIP).
        num_joint_layers: blocks with two streams and joint attention.
        num_single_layers: blocks with one stream, after the joint blocks.
        rope_axes: features of a head that rotate with t, h and w.
        guidance: guidance scale as a condition of a guidance-distilled network, the same for all samples.
    """

    removed_settings: ClassVar[Mapping[str, object]] = WITHOUT_CLASSES
    supports: ClassVar[Supports] = Supports(levels=False)
    splits_all_tokens: ClassVar[bool] = False

    in_channels: int = 16
    context_size: Optional[int] = 4096
    pooled_size: int = 768
    hidden_size: int = 3072
    num_attention_heads: int = 24
    num_joint_layers: int = 19
    num_single_layers: int = 38
    ffn_hidden_size: Optional[int] = 12288
    position_embedding: Positions = "rope_3d"
    rope_axes: list[int] = field(default_factory=lambda: [16, 56, 56])
    guidance: Optional[float] = None

    def conditions(self) -> tuple[Condition, ...]:
        return (*super().conditions(), replace(POOLED, shape=(self.pooled_size,), dropout=self.context_dropout))

    @property
    def num_layers(self) -> int:
        """Number of blocks of both kinds."""
        return self.num_joint_layers + self.num_single_layers

    def validate(self) -> None:
        self.check_sizes()
        if self.context_size is None:
            raise ConfigError("model.context_size=None, but FLUX needs text; set it to the embeddings' width (4096)")
        if self.ffn_size % self.num_attention_heads:
            nearest = max(1, round(self.ffn_size / self.num_attention_heads)) * self.num_attention_heads
            raise ConfigError(
                f"model.ffn_hidden_size={self.ffn_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}, but a single-stream block splits its MLP over "
                f"the heads; use {nearest}"
            )
        self.check_positions(self.rope_axes)
        if self.position_embedding != "rope_3d":
            where = f"with model.position_embedding={self.position_embedding!r}"
            check_unused("model", self, ["rope_axes"], where, "use 'rope_3d'")

    def megatron_sizes(self) -> TransformerSizes:
        return replace(super().megatron_sizes(), qk_layernorm=True)

    def layer_kind(self, layer: int) -> bool:
        return layer < self.num_joint_layers
