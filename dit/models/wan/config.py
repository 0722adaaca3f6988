"""Sizes of the Wan-shaped backbone."""

from dataclasses import dataclass
from typing import Literal, Optional

from dit.models.base import Supports
from dit.models.cross_config import CrossAttentionModelConfig

Positions = Literal["rope_3d", "sincos_3d"]


@dataclass(kw_only=True)
class WanConfig(CrossAttentionModelConfig):
    """Wan 2.1's text-to-video transformer, with one modulation for all layers. The defaults are the 1.3B model.

    Texts (UMT5-XXL) are projected once for all layers; query and key norms span all heads. Conditioning on class, frame
    rate and size is optional; Wan has none of them.
    """

    supports = Supports(aligned=True, compiled=True, fixed_packs=True)
    norm_full_width = True

    context_size: Optional[int] = 4096
    hidden_size: int = 1536
    num_layers: int = 30
    num_attention_heads: int = 12
    ffn_hidden_size: Optional[int] = 8960
    fps_conditioning: bool = False
    position_embedding: Positions = "rope_3d"
