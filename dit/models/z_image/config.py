"""Sizes of Z-Image."""

from dataclasses import dataclass, field
from typing import Optional

from dit.models.streams.config import StreamsConfig
from dit.models.transformer_config import Activation


@dataclass(kw_only=True)
class ZImageConfig(StreamsConfig):
    """Z-Image: two refiners of text and image, then one stream; learned padding. The defaults are the 6B model.

    Texts are hidden states of Qwen3-4B. The network embeds 1 - t. Text and image of a sample are extended to multiples
    of 32 tokens inside the network, so packs and their token counts do not include these tokens.

    Source: Z-Image Team 2025, arXiv:2511.22699; diffusers 0.38, `transformer_z_image.py`.
    """

    block = "sandwich"
    add_bias = False
    text_norm = True
    condition_limit = 256
    reversed_time = True
    time_hidden_size = 1024
    modulation_silu = False
    learned_padding = 32
    text_positions = "before_image"

    in_channels: int = 16
    context_size: Optional[int] = 2560
    hidden_size: int = 3840
    num_attention_heads: int = 30
    num_joint_layers: int = 2
    num_single_layers: int = 30
    ffn_hidden_size: Optional[int] = 10240
    layernorm_epsilon: float = 1e-5
    activation: Activation = "swiglu"
    rope_theta: float = 256.0
    rope_axes: list[int] = field(default_factory=lambda: [32, 48, 48])
