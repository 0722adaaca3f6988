"""Sizes of Stable Diffusion 3."""

from dataclasses import dataclass, field
from typing import Optional

from dit.models.streams.config import Positions, StreamsConfig


@dataclass(kw_only=True)
class SD3Config(StreamsConfig):
    """Stable Diffusion 3 and 3.5: joint blocks only, added positions. The defaults are 3.5 large (8B).

    Texts are tokens of CLIP (twice, joined along the width) and of T5-XXL, joined along the text; the pooled text is
    that of both CLIP models.

    Source: Esser et al. 2024, arXiv:2403.03206; diffusers 0.38, `transformer_sd3.py`; sizes of 3.5 large.
    """

    text_output = False

    in_channels: int = 16
    context_size: Optional[int] = 4096
    pooled_size: Optional[int] = 2048
    hidden_size: int = 2432
    num_attention_heads: int = 38
    num_joint_layers: int = 38
    num_single_layers: int = 0
    position_embedding: Positions = "sincos_2d"
    position_crop: Optional[list[int]] = field(default_factory=lambda: [192, 64])
    rope_axes: list[int] = field(default_factory=lambda: [16, 24, 24])
