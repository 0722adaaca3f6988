"""Settings of the conditional DDPM UNet."""

from dataclasses import dataclass
from typing import Optional

from dit.errors import ConfigError
from dit.models.base import PICTURES, TransformerSizes
from dit.models.conditioned import ClassConditioned
from dit.ranges import WIDTH, ranged


@dataclass(kw_only=True)
class DDPMUNetConfig(ClassConditioned):
    """A small UNet for pictures, conditioned on time and class.

    Attributes:
        hidden_size: width of the tokens, first level (Imagen's UNets), or conditions (DDPM UNet).
        block_out_channels: channels at each resolution, the full one first.
        mid_out_channels: channels of pairs of convolutions at the lowest resolution.
        num_attention_heads: attention heads (of SANA, linear ones); of a UNet with `head_size`, if that is None.
    """

    supports = PICTURES

    in_channels: int = 3
    patch_spatial: int = 1
    num_classes: Optional[int] = 10
    hidden_size: int = ranged(256, WIDTH)
    block_out_channels: list[int] = ranged([64, 128, 256, 256], WIDTH)
    mid_out_channels: list[int] = ranged([256, 256], WIDTH)
    num_attention_heads: int = ranged(4, WIDTH)

    @property
    def halvings(self) -> int:
        return len(self.block_out_channels) - 1

    def validate(self) -> None:
        super().validate()
        if self.hidden_size % 2:
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} must be even, half for sines and half for cosines; use "
                f"{self.hidden_size + 1}"
            )
        if len(self.block_out_channels) < 2 or not self.mid_out_channels:
            raise ConfigError(
                f"model.block_out_channels={self.block_out_channels}, model.mid_out_channels={self.mid_out_channels}: "
                "the UNet needs at least two resolutions and one pair of convolutions in the middle"
            )
        if any(count % self.num_attention_heads for count in self.block_out_channels):
            raise ConfigError(
                f"model.block_out_channels={self.block_out_channels} must be multiples of "
                f"model.num_attention_heads={self.num_attention_heads}"
            )

    @property
    def head_sizes(self) -> frozenset[int]:
        return frozenset(count // self.num_attention_heads for count in self.block_out_channels)

    def megatron_sizes(self) -> TransformerSizes:
        return TransformerSizes(
            num_layers=1, hidden_size=self.block_out_channels[-1], num_attention_heads=self.num_attention_heads
        )
