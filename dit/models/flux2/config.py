"""Sizes of FLUX.2."""

from dataclasses import dataclass, field
from typing import Optional

from dit.models.streams.config import StreamsConfig
from dit.models.transformer_config import Activation


@dataclass(kw_only=True)
class Flux2Config(StreamsConfig):
    """FLUX.2: three modulations for all blocks, no biases, SwiGLU, a fourth axis for texts. The defaults are dev (32B).

    Texts are stacked hidden states of Mistral-3 (dev) or Qwen3 (klein). Latents have 32 channels, normalised for each
    position of a 2 x 2 patch.

    Source: diffusers 0.38, `transformer_flux2.py` and `pipeline_flux2.py`.
    """

    frame_spacing = 10
    shared_modulation = True
    add_bias = False
    text_positions = "own_axis"

    in_channels: int = 32
    context_size: Optional[int] = 15360
    hidden_size: int = 6144
    num_attention_heads: int = 48
    num_joint_layers: int = 8
    num_single_layers: int = 48
    ffn_hidden_size: Optional[int] = 18432
    activation: Activation = "swiglu"
    rope_theta: float = 2000.0
    rope_axes: list[int] = field(default_factory=lambda: [32, 32, 32, 32])
