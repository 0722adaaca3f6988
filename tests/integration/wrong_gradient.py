"""A recipe of a user's own, whose network states the sharding of one parameter wrongly."""

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import nemo_run as run

from dit.backends.provider import LayerProvider
from dit.backends.sharding import ParameterSharding, set_sharding
from dit.models.base import Stage
from dit.models.dit.config import DiTConfig
from dit.models.dit.model import DiT
from recipes.tiny import tiny_dit_pack


@dataclass(kw_only=True)
class WrongConfig(DiTConfig):
    """A DiT with a mistake."""

    model_path: ClassVar[Optional[str]] = f"{__name__}:Wrong"


class Wrong(DiT):
    """The bias of its head meets the tokens of one sequence shard, and is stated to meet all of them."""

    def __init__(self, config: WrongConfig, provider: LayerProvider, attention: Any, stage: Stage) -> None:
        super().__init__(config, provider, attention, stage)
        if stage.last:
            set_sharding(self.head.linear.bias, ParameterSharding(gradient_covers="all_tokens"))


def tiny() -> run.Partial:
    """tiny_dit_pack with this network."""
    recipe = tiny_dit_pack()
    recipe.model = run.Config(
        WrongConfig,
        hidden_size=64,
        num_layers=2,
        num_attention_heads=4,
        num_classes=10,
        position_embedding="sincos_3d",
    )
    return recipe
