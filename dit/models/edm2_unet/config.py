"""Settings of the EDM2 UNet."""

from dataclasses import dataclass, field
from typing import Optional

from dit.errors import ConfigError
from dit.models.base import PICTURES, TransformerSizes
from dit.models.conditioned import ClassConditioned
from dit.ranges import LAYERS, WIDTH, check_range, ranged, whole


@dataclass(kw_only=True)
class EDM2UNetConfig(ClassConditioned):
    """The magnitude-preserving UNet of EDM2, conditioned on noise level and class.

    The default sizes are those of EDM2-S for latents of 64 x 64: 280 M parameters.

    Attributes:
        block_out_channels: channels at each resolution, the full one first; the conditioning vector has the most.
        layers_per_block: residual blocks at each resolution down; one more up.
        attention_levels: levels whose blocks have attention, counted from 0 at the full size.
        head_size: features per attention head.
    """

    supports = PICTURES

    patch_spatial: int = 1
    num_classes: Optional[int] = 1000
    block_out_channels: list[int] = ranged([192, 384, 576, 768], WIDTH)
    layers_per_block: int = ranged(3, LAYERS)
    attention_levels: list[int] = field(default_factory=lambda: [2, 3])
    head_size: int = ranged(64, WIDTH)

    @property
    def halvings(self) -> int:
        return len(self.block_out_channels) - 1

    @property
    def side_multiple(self) -> int:
        return 1 << self.halvings

    @property
    def condition_size(self) -> int:
        """Width of the conditioning vector."""
        return max(self.block_out_channels)

    @property
    def head_sizes(self) -> frozenset[int]:
        return frozenset({self.head_size})

    def validate(self) -> None:
        super().validate()
        levels = len(self.block_out_channels)
        if not levels:
            raise ConfigError("model.block_out_channels=[] needs at least one resolution; [192,384,576,768] is EDM2-S")
        check_range("model.attention_levels", self.attention_levels, whole(0, levels - 1))
        if len(set(self.attention_levels)) < len(self.attention_levels):
            raise ConfigError(f"model.attention_levels={self.attention_levels} names a level twice; name each once")
        # The first block on the way up has attention at the lowest resolution.
        attending = sorted({*self.attention_levels, levels - 1})
        if any(self.block_out_channels[level] % self.head_size for level in attending):
            raise ConfigError(
                f"model.block_out_channels={self.block_out_channels} at the levels {attending} with attention must be "
                f"multiples of model.head_size={self.head_size}"
            )

    def megatron_sizes(self) -> TransformerSizes:
        channels = self.block_out_channels[-1]
        return TransformerSizes(num_layers=1, hidden_size=channels, num_attention_heads=channels // self.head_size)
