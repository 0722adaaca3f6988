"""A user's recipe whose network declares a wrong sharding for one parameter."""

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
    """A DiT with this mistake."""

    model_path: ClassVar[Optional[str]] = f"{__name__}:Wrong"


class Wrong(DiT):
    """The head's bias is applied to the tokens of one sequence shard, but declared as applied to all tokens."""

    def __init__(self, config: WrongConfig, provider: LayerProvider, attention: Any, stage: Stage) -> None:
        super().__init__(config, provider, attention, stage)
        if stage.last:
            set_sharding(self.head.linear.bias, ParameterSharding(gradient_covers="all_tokens"))


def tiny() -> run.Partial:
    """tiny_dit_pack with this network."""
    recipe = tiny_dit_pack()
    recipe.model = run.Config(
        WrongConfig, hidden_size=64, num_layers=2, num_attention_heads=4, num_classes=10, position_embedding="sincos_3d"
    )
    return recipe
