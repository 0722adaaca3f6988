"""Settings of the KL and VQ autoencoders."""

from dataclasses import dataclass
from typing import Optional

from dit.errors import ConfigError
from dit.models.base import PICTURES, ModelConfig, TransformerSizes
from dit.ranges import FINITE, LAYERS, POSITIVE, WIDTH, ranged


@dataclass(kw_only=True)
class AutoencoderConfig(ModelConfig):
    """A convolutional autoencoder of pictures.

    A token is one position of the latent. Each step between two entries of `block_out_channels` compresses by 2.

    Attributes:
        latent_channels: channels of the latent.
        block_out_channels: channels at each resolution, the full one first.
        layers_per_block: residual blocks at each resolution down; one more up.
        norm_num_groups: groups of the group norms.
        mid_block_add_attention: use attention over the positions of the latent.
        codebook_size: codebook entries of a VQ autoencoder; None for a KL autoencoder.
        scaling_factor, shift_factor: latents are (z - shift_factor) * scaling_factor; None: measured by the export. A
            VQ autoencoder has no shift.
    """

    supports = PICTURES

    in_channels: int = 3
    patch_spatial: int = 8
    latent_channels: int = ranged(4, WIDTH)
    block_out_channels: list[int] = ranged([128, 256, 512, 512], WIDTH)
    layers_per_block: int = ranged(2, LAYERS)
    norm_num_groups: int = ranged(32, WIDTH)
    mid_block_add_attention: bool = True
    codebook_size: Optional[int] = ranged(None, WIDTH)
    scaling_factor: Optional[float] = ranged(None, POSITIVE)
    shift_factor: Optional[float] = ranged(None, FINITE)

    @property
    def quantizes(self) -> bool:
        return self.codebook_size is not None

    @property
    def encoded_channels(self) -> int:
        """Channels of the encoder's output: z, or mean and log variance."""
        return self.latent_channels if self.quantizes else 2 * self.latent_channels

    @property
    def posterior_features(self) -> int:
        return 2 * self.latent_channels + (1 if self.quantizes else 0)

    @property
    def output_features(self) -> int:
        return self.token_channels + self.posterior_features

    def validate(self) -> None:
        super().validate()
        if self.patch_temporal != 1:
            raise ConfigError(
                f"model.patch_temporal={self.patch_temporal}, but each frame is encoded separately; set it to 1"
            )
        compression = 2 ** (len(self.block_out_channels) - 1)
        if self.patch_spatial != compression:
            raise ConfigError(
                f"model.patch_spatial={self.patch_spatial}: {len(self.block_out_channels)} resolutions "
                f"(model.block_out_channels={self.block_out_channels}) compress {compression} times; set it to "
                f"{compression}, or change the number of resolutions"
            )
        groups = self.norm_num_groups
        if any(count % groups for count in self.block_out_channels):
            raise ConfigError(
                f"model.block_out_channels={self.block_out_channels} must be multiples of "
                f"model.norm_num_groups={groups}"
            )
        if self.quantizes:
            if self.shift_factor is not None:
                raise ConfigError(
                    f"model.shift_factor={self.shift_factor}: the latents of a VQ autoencoder "
                    f"(model.codebook_size={self.codebook_size}) are scaled without a shift; leave it out"
                )
        elif self.posterior_features >= self.token_channels:
            raise ConfigError(
                f"model.latent_channels={self.latent_channels} gives {self.posterior_features} numbers of mean and "
                f"variance for {self.token_channels} pixel values, so nothing is compressed; use at most "
                f"{(self.token_channels - 1) // 2}"
            )

    def megatron_sizes(self) -> TransformerSizes:
        return TransformerSizes(num_layers=1, hidden_size=self.block_out_channels[-1], num_attention_heads=1)
