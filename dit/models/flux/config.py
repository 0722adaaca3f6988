"""Sizes of FLUX.1."""

from dataclasses import dataclass
from typing import Optional

from dit.models.conditioned import ControlConditioned
from dit.models.streams.config import StreamsConfig


@dataclass(kw_only=True)
class FluxConfig(StreamsConfig, ControlConditioned):
    """FLUX.1: blocks with text and image as two streams, then blocks with one stream. The defaults are the 12B model.

    The text (T5-XXL) has no positions, and t of an image is 0. The pooled text is CLIP's. FLUX.1 Canny and Depth have
    `control_channels=16`.

    Source: black-forest-labs/flux, `model.py`; sizes and defaults of FLUX.1-dev.
    """

    context_size: Optional[int] = 4096
    pooled_size: Optional[int] = 768
    hidden_size: int = 3072
    num_attention_heads: int = 24
    num_joint_layers: int = 19
    num_single_layers: int = 38
    ffn_hidden_size: Optional[int] = 12288
