"""Settings of Imagen's Efficient UNet."""

from dataclasses import dataclass, field
from typing import Optional

from dit.models.imagen_config import ImagenConfig


@dataclass(kw_only=True)
class EfficientUNetConfig(ImagenConfig):
    """The Efficient UNet for super-resolution, with more blocks at low resolution and resampling outside the blocks.

    Each level except the last downsamples before its blocks, so level 0 has half the full size. On the way up, the
    blocks and the attention of a level have the channels of the level above.
    """

    channel_multipliers: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 8])
    num_res_blocks: list[int] = field(default_factory=lambda: [2, 4, 8, 8, 8])
    attention_levels: list[int] = field(default_factory=lambda: [3, 4])
    low_resolution_factor: Optional[int] = 4

    @property
    def outputs_up(self) -> list[int]:
        """Channels of each level on the way up, the full size first."""
        return [self.channels[0], *self.channels[:-1]]

    @property
    def attended_channels(self) -> set[int]:
        return super().attended_channels | {self.outputs_up[level] for level in self.attention_levels}
