"""Sizes of Lumina-Image 2.0."""

from dataclasses import dataclass, field
from typing import Optional

from dit.models.streams.config import StreamsConfig
from dit.models.transformer_config import Activation


@dataclass(kw_only=True)
class Lumina2Config(StreamsConfig):
    """Lumina-Image 2.0: two refiners of text and image, then one stream; grouped queries. The defaults are 2.6B.

    Texts are hidden states of Gemma 2 2B. The network embeds 1 - t without a factor.

    Source: Qin et al. 2025, arXiv:2503.21758; diffusers 0.38, `transformer_lumina2.py`.
    """

    block = "sandwich"
    add_bias = False
    text_norm = True
    condition_limit = 1024
    reversed_time = True
    text_positions = "before_image"

    in_channels: int = 16
    context_size: Optional[int] = 2304
    hidden_size: int = 2304
    num_attention_heads: int = 24
    num_query_groups: Optional[int] = 8
    num_joint_layers: int = 2
    num_single_layers: int = 26
    ffn_hidden_size: Optional[int] = 9216
    time_scale: float = 1.0
    layernorm_epsilon: float = 1e-5
    activation: Activation = "swiglu"
    rope_axes: list[int] = field(default_factory=lambda: [32, 32, 32])
