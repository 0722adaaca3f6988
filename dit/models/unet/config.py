"""Settings of Imagen's regular UNet."""

from dataclasses import dataclass
from typing import Optional

from dit.models.imagen_config import ImagenConfig
from dit.ranges import SHARE_BELOW_1, WIDTH, ranged


@dataclass(kw_only=True)
class UNetConfig(ImagenConfig):
    """The regular UNet, with skip connections from every output and attention in the middle.

    Attributes:
        condition_size: width of the projected text tokens for attention.
        dropout: dropout rate in residual blocks; counter-based.
    """

    condition_size: int = ranged(512, WIDTH)
    dropout: float = ranged(0.0, SHARE_BELOW_1)

    @property
    def text_width(self) -> Optional[int]:
        return None if self.context_size is None else self.condition_size

    @property
    def attended_channels(self) -> set[int]:
        return super().attended_channels | {self.channels[-1]}

    @property
    def draws_in_training(self) -> bool:
        return self.dropout > 0
