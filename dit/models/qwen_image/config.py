"""Sizes of Qwen-Image."""

from dataclasses import dataclass, field
from typing import Optional

from dit.models.streams.config import StreamsConfig


@dataclass(kw_only=True)
class QwenImageConfig(StreamsConfig):
    """Qwen-Image: joint blocks only; image positions from the centre, texts after them. The defaults are the 20B model.

    Texts are hidden states of Qwen2.5-VL. The last block computes a text that nothing reads, as in the published model,
    so the weights for it have no gradient.

    Source: Wu et al. 2025, arXiv:2508.02324; diffusers 0.38, `transformer_qwenimage.py`.
    """

    text_norm = True
    text_positions = "after_image"
    centred_positions = True

    in_channels: int = 16
    context_size: Optional[int] = 3584
    hidden_size: int = 3072
    num_attention_heads: int = 24
    num_joint_layers: int = 60
    num_single_layers: int = 0
    ffn_hidden_size: Optional[int] = 12288
    rope_axes: list[int] = field(default_factory=lambda: [16, 56, 56])
