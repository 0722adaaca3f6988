"""Sizes of the latent-diffusion UNet."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Optional

from dit.condition_table import CONTROL
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.models.base import ModelConfig, Supports, TransformerSizes
from dit.models.transformer_config import check_numbers


@dataclass(kw_only=True)
class LDMUNetConfig(ModelConfig):
    """The UNet of latent diffusion, conditioned on time and text; each frame of a clip is a picture of its own.

    The defaults are those of Stable Diffusion v1: 859,520,964 parameters, and a learned null token for dropped texts.

    Attributes:
        block_out_channels: channels at each resolution, the full one first; the conditioning vector is four times as
            wide as the first.
        layers_per_block: residual blocks at each resolution on the way down; one more on the way up.
        transformer_layers: layers of the transformer behind each residual block of a resolution; 0 for none.
        mid_transformer_layers: layers of the transformer at the bottom; 0 for none.
        num_attention_heads: heads of every attention.
        norm_num_groups: groups of the group norms.
        control_channels: channels of a control picture of the latent's size, such as a semantic map with a channel for
            each class; it stands behind the latent in the input. None for none.

    Source of the control picture: Rombach et al. 2022, arXiv:2112.10752, section 4.3.2 (semantic synthesis).
    """

    supports: ClassVar[Supports] = Supports(
        tensor=False, sequence=False, pipeline=False, context=False, expert=False, mixed_shapes=False
    )

    patch_spatial: int = 1
    context_size: Optional[int] = 768
    block_out_channels: list[int] = field(default_factory=lambda: [320, 640, 1280, 1280])
    layers_per_block: int = 2
    transformer_layers: list[int] = field(default_factory=lambda: [1, 1, 1, 0])
    mid_transformer_layers: int = 1
    num_attention_heads: int = 8
    norm_num_groups: int = 32
    control_channels: Optional[int] = None

    @property
    def input_features(self) -> int:
        """Channels of the input of the network: those of a latent and of a control picture."""
        return (self.in_channels + (self.control_channels or 0)) * self.patch_temporal * self.patch_spatial**2

    def conditions(self) -> tuple[Condition, ...]:
        if self.control_channels is None:
            return super().conditions()
        return (*super().conditions(), replace(CONTROL, shape=(self.control_channels,)))

    @property
    def halvings(self) -> int:
        return len(self.block_out_channels) - 1

    @property
    def condition_size(self) -> int:
        """Width of the conditioning vector."""
        return 4 * self.block_out_channels[0]

    def validate(self) -> None:
        if self.num_classes is not None:
            raise ConfigError(
                f"model.num_classes={self.num_classes}: this UNet takes a text and no class; set it to null, or use "
                "another backbone"
            )
        if self.context_size is None:
            raise ConfigError("model.context_size=None: this UNet attends to texts; give the width of their embeddings")
        check_numbers(self)
        channels, groups, heads = self.block_out_channels, self.norm_num_groups, self.num_attention_heads
        if len(self.transformer_layers) != len(channels) or not channels:
            raise ConfigError(
                f"model.transformer_layers={self.transformer_layers} must have one number for each resolution of "
                f"model.block_out_channels={channels}"
            )
        if channels[0] % 2 or any(count % groups or count % heads for count in channels):
            raise ConfigError(
                f"model.block_out_channels={channels} must be even, and multiples of model.norm_num_groups={groups} "
                f"and of model.num_attention_heads={heads}"
            )
        if not any(self.transformer_layers) and not self.mid_transformer_layers:
            raise ConfigError(
                f"model.transformer_layers={self.transformer_layers} and model.mid_transformer_layers=0: nothing reads "
                "the text; give some resolution a transformer"
            )

    def megatron_sizes(self) -> TransformerSizes:
        return TransformerSizes(
            num_layers=1, hidden_size=self.block_out_channels[-1], num_attention_heads=self.num_attention_heads
        )
