"""Sizes of the SANA backbone."""

from dataclasses import dataclass
from typing import Literal, Optional

from dit.models.base import Supports
from dit.models.cross_config import CrossAttentionModelConfig
from dit.models.transformer_config import check_heads
from dit.ranges import WIDTH, check_unused, ranged

Positions = Literal["none", "sincos_2d", "sincos_3d"]


@dataclass(kw_only=True)
class SanaConfig(CrossAttentionModelConfig):
    """SANA: linear self-attention and a feed-forward with a convolution, which replaces positions.

    The defaults are the model with 1.6 B parameters, for texts of Gemma 2 2B and latents of the DC-AE f32c32.

    Attributes:
        num_cross_attention_heads: heads of the cross-attention.
    """

    supports = Supports(aligned=True, fixed_packs=True)
    norm_full_width = True

    in_channels: int = 32
    patch_spatial: int = 1
    context_size: Optional[int] = 2304
    hidden_size: int = 2240
    num_layers: int = 20
    num_attention_heads: int = 70
    num_cross_attention_heads: int = ranged(20, WIDTH)
    ffn_hidden_size: Optional[int] = 5600
    qk_layernorm: bool = False
    fps_conditioning: bool = False
    position_embedding: Positions = "none"

    @property
    def takes_references(self) -> bool:
        return False  # tokens outside the grid have no place in a picture

    def validate(self) -> None:
        super().validate()
        where = "with linear attention, which has one key head per query head"
        check_unused("model", self, ["num_query_groups"], where, "use None")
        check_heads("num_cross_attention_heads", self.num_cross_attention_heads, self.hidden_size)

    @property
    def convolved_channels(self) -> int:
        return self.ffn_size  # pairs of gate and value

    @property
    def head_sizes(self) -> frozenset[int]:
        return frozenset({self.hidden_size // self.num_cross_attention_heads})  # self-attention is linear

    @property
    def attention_tokens(self) -> int:
        return 1 << 40  # the cost of a token does not depend on the length of its sample
