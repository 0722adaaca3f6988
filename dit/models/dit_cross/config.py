"""Settings of the DiT with text cross-attention."""

from dataclasses import dataclass, replace
from typing import Optional

from dit.models.base import Supports
from dit.models.conditioned import ControlConditioned
from dit.models.cross_config import CrossAttentionModelConfig
from dit.models.routing_config import TokenRouted
from dit.models.transformer_config import Positions
from dit.ranges import WIDTH, ranged


@dataclass(kw_only=True)
class DiTCrossConfig(CrossAttentionModelConfig, TokenRouted, ControlConditioned):
    """DiT with text cross-attention, conditioned on time, frame rate, size and class by adaLN-Zero.

    Attributes:
        add_bias: use biases in the linear layers of the blocks.
        adaln_lora_rank: rank of the modulations; None for full matrices.
    """

    add_bias: bool = False
    adaln_lora_rank: Optional[int] = ranged(None, WIDTH)
    position_embedding: Positions = "sincos_3d"

    @property
    def supports(self) -> Supports:
        return replace(super().supports, aligned=True, compiled=True)
