"""Sizes of the Movie Gen backbone."""

from dataclasses import dataclass
from typing import Literal, Optional

from dit.errors import ConfigError
from dit.models.base import Supports
from dit.models.cross_config import CrossAttentionModelConfig
from dit.models.expert_options import ExpertOptions
from dit.ranges import PATCHES, check_unused, ranged

Positions = Literal["learned_3d", "sincos_3d", "rope_3d"]


@dataclass(kw_only=True)
class MovieGenConfig(CrossAttentionModelConfig, ExpertOptions):
    """A diffusion transformer with Llama blocks: RMSNorm, SwiGLU, grouped-query attention, no biases.

    The feed-forwards may be mixtures of SwiGLU experts; with expert choice, this is NeMo's variant of EC-DiT. Query and
    key norms are as in NeMo's DiT; the paper's Llama 3 block and NeMo's Movie Gen have none (`qk_layernorm=False`).

    Attributes:
        max_grid: largest numbers of learned positions along t, h and w.
    """

    supports = Supports(aligned=True, compiled=True, fixed_packs=True)
    add_bias = False

    hidden_size: int = 2048
    num_layers: int = 16
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 8
    ffn_hidden_size: Optional[int] = 8192
    layernorm_epsilon: float = 1e-5
    fps_conditioning: bool = False
    position_embedding: Positions = "learned_3d"
    max_grid: list[int] = ranged([128, 120, 120], PATCHES)

    @property
    def takes_references(self) -> bool:
        return self.position_embedding != "learned_3d"  # the tables end at the largest grid

    def validate(self) -> None:
        super().validate()
        if len(self.max_grid) != 3:
            raise ConfigError(
                f"model.max_grid={self.max_grid} must be three numbers: the largest t, h and w in patches"
            )
        if self.position_embedding != "learned_3d":
            where = f"with model.position_embedding={self.position_embedding!r}"
            check_unused("model", self, ["max_grid"], where, "use 'learned_3d'")

    @property
    def largest_grid(self) -> Optional[tuple[int, int, int]]:
        if self.position_embedding != "learned_3d":
            return None
        t, h, w = self.max_grid
        return t, h, w
