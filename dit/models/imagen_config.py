"""Settings common to Imagen's two UNets."""

from dataclasses import dataclass, field, replace
from typing import Literal, Optional

from dit.condition_table import AUGMENTATION, LOW_RESOLUTION
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.models.base import PICTURES, TransformerSizes
from dit.models.conditioned import ClassConditioned, TextConditioned
from dit.ranges import LAYERS, WIDTH, check_range, ranged, whole
from dit.resize import Kernel, LowResolution

SAMPLING_AUGMENTATION = 0.002
"""Default noise level of the low-resolution picture in sampling."""

AttentionType = Literal["self", "cross", "fused", "stacked"]


@dataclass(kw_only=True)
class ImagenConfig(TextConditioned, ClassConditioned):
    """A UNet on pixels, conditioned on text and, for super-resolution, on a low-resolution picture.

    Level i has pictures of 1 / 2^i of the full size; in the Efficient UNet, 1 / 2^(i + 1).

    Attributes:
        hidden_size: width of the tokens, first level (Imagen's UNets), or conditions (DDPM UNet).
        channel_multipliers: multiples of `hidden_size` at each level, the full size first.
        num_res_blocks: residual blocks of each level on the way down.
        attention_levels: levels with attention, counted from 0 at the full size.
        attention_type: attention to positions, text, both at once (`fused`), or one after the other with a feed-forward
            (`stacked`).
        head_size: features per attention head; None: `num_attention_heads` counts.
        num_attention_heads: attention heads (of SANA, linear ones); of a UNet with `head_size`, if that is None.
        norm_num_groups: groups of the group norms.
        stable_attention: attention whose backward pass does not overflow in half precision.
        low_resolution_factor, low_resolution_kernel: condition on a picture smaller by this factor, enlarged by a
            bicubic kernel (`opencv`: a = -0.75).
        noise_augmentation: in training, noise that picture at a random level, and condition on the level.
    """

    supports = replace(PICTURES, compiled=True)

    in_channels: int = 3
    patch_spatial: int = ranged(1, whole(1, 64))
    context_size: Optional[int] = 1024
    hidden_size: int = ranged(128, WIDTH)
    channel_multipliers: list[int] = ranged([1, 2, 4, 8], WIDTH)
    num_res_blocks: list[int] = ranged([2, 2, 2, 2], LAYERS)
    attention_levels: list[int] = field(default_factory=lambda: [3])
    attention_type: AttentionType = "fused"
    head_size: Optional[int] = ranged(64, WIDTH)
    num_attention_heads: int = ranged(4, WIDTH)
    norm_num_groups: int = ranged(32, WIDTH)
    stable_attention: bool = False
    low_resolution_factor: Optional[int] = ranged(None, whole(2, 64))
    low_resolution_kernel: Kernel = "pil"
    noise_augmentation: bool = False

    @property
    def vector_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def text_width(self) -> Optional[int]:
        """Width of the text tokens for attention; None without text."""
        return self.context_size

    @property
    def channels(self) -> list[int]:
        """Channels of each level, the full size first."""
        return [self.hidden_size * multiplier for multiplier in self.channel_multipliers]

    @property
    def attended_channels(self) -> set[int]:
        """Channel counts of the levels with attention."""
        return {self.channels[level] for level in self.attention_levels}

    @property
    def orders_frames(self) -> bool:
        return False  # clips are refused

    @property
    def side_multiple(self) -> int:
        return 2 ** (len(self.channel_multipliers) - 1)

    def heads(self, channels: int) -> int:
        return self.num_attention_heads if self.head_size is None else channels // self.head_size

    @property
    def head_sizes(self) -> frozenset[int]:
        return frozenset(count // self.heads(count) for count in self.attended_channels)

    def conditions(self) -> tuple[Condition, ...]:
        conditions = [replace(c, null=0.0) if c.name == "context" else c for c in super().conditions()]
        if self.low_resolution_factor is not None:
            derive = LowResolution(self.low_resolution_factor, self.low_resolution_kernel)
            conditions.append(replace(LOW_RESOLUTION, shape=(self.in_channels,), derive=derive))
        if self.noise_augmentation:
            conditions.append(replace(AUGMENTATION, default=SAMPLING_AUGMENTATION, limits=(1e-4, 80.0)))
        return tuple(conditions)

    def megatron_sizes(self) -> TransformerSizes:
        return TransformerSizes(num_layers=1, hidden_size=self.hidden_size, num_attention_heads=1)

    def validate(self) -> None:
        super().validate()
        levels = whole(0, len(self.channel_multipliers) - 1)
        check_range("model.attention_levels", self.attention_levels, levels)
        if self.patch_temporal != 1:
            raise ConfigError(f"model.patch_temporal={self.patch_temporal}, but this UNet is for pictures; set it to 1")
        self._check_levels()
        self._check_conditions()

    def _check_levels(self) -> None:
        levels = len(self.channel_multipliers)
        if len(self.num_res_blocks) != levels or not levels:
            raise ConfigError(
                f"model.num_res_blocks={self.num_res_blocks} must have an entry for each of the {levels} levels of "
                f"model.channel_multipliers={self.channel_multipliers}, at least one"
            )
        if len(set(self.attention_levels)) < len(self.attention_levels):
            raise ConfigError(f"model.attention_levels={self.attention_levels} names a level twice; name each once")
        groups = self.norm_num_groups
        if indivisible := [count for count in {*self.channels, *self.attended_channels} if count % groups]:
            raise ConfigError(
                f"a level has {indivisible[0]} channels (model.hidden_size={self.hidden_size}), not a multiple of "
                f"model.norm_num_groups={groups}"
            )
        for count in sorted(self.attended_channels):
            heads = self.heads(count)
            if heads < 1 or count % heads or (self.head_size is not None and count % self.head_size):
                raise ConfigError(
                    f"attention over {count} channels (model.attention_levels={self.attention_levels}) cannot be "
                    f"split into heads by model.head_size={self.head_size}, model.num_attention_heads="
                    f"{self.num_attention_heads}; use a head size that divides it"
                )

    def _check_conditions(self) -> None:
        if self.text_width is not None and self.attention_type != "self" and self.text_width % self.norm_num_groups:
            raise ConfigError(
                f"the width {self.text_width} of the text tokens is not a multiple of model.norm_num_groups="
                f"{self.norm_num_groups}, which attention needs to normalise them; change one of them"
            )
        if self.context_size is None and self.attention_type != "self":
            raise ConfigError(
                f"model.attention_type={self.attention_type!r} needs text, but model.context_size is None; use "
                "attention_type='self', or set context_size to the width of the text embeddings"
            )
        if self.noise_augmentation and self.low_resolution_factor is None:
            raise ConfigError(
                "model.noise_augmentation=True adds noise to the low-resolution picture, but there is none; set "
                "model.low_resolution_factor"
            )
