"""Sizes of the PRX backbone."""

from dataclasses import dataclass
from typing import Optional

from dit.models.base import Supports
from dit.models.conditioned import NullTextConditioned
from dit.models.transformer_config import Positions, TransformerModelConfig
from dit.ranges import LAYERS, LAYERS_OR_ZERO, ranged


@dataclass(kw_only=True)
class PRXConfig(TransformerModelConfig, NullTextConditioned):
    """PRX: image tokens attend to themselves and to the text, whose tokens no layer changes.

    The defaults are the model with 1.2 B parameters, for texts of T5Gemma 2B and latents of FLUX.1's autoencoder.

    Attributes:
        num_layers: number of blocks.
        rope_axes: features of a head that rotate with t, h, w and, of FLUX.2, the text's index; None for a third each.
    """

    supports = Supports(aligned=True)
    add_bias = False
    qk_layernorm = True

    in_channels: int = 16
    context_size: Optional[int] = 2304
    hidden_size: int = 1792
    num_layers: int = ranged(16, LAYERS)
    num_attention_heads: int = 28
    ffn_hidden_size: Optional[int] = 6272
    position_embedding: Positions = "rope_3d"
    rope_axes: list[int] = ranged([0, 32, 32], LAYERS_OR_ZERO)
