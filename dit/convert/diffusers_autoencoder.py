"""Convert diffusers' `AutoencoderKL` and `VQModel` to and from our autoencoder.

Models with other activations, other kinds of blocks, or per-channel statistics are errors.

Source: diffusers 0.38, `models/autoencoders/autoencoder_kl.py` and `vq_model.py`, names and settings.
"""

from collections.abc import Collection, Mapping
from typing import Any

from dit.convert.diffusers_format import DiffusersFormat, LatentSize, TrainedModel
from dit.convert.rules import Rule, RuleBook, Shape, renamed
from dit.errors import ConfigError
from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.base import ModelConfig
from dit.objectives.autoencoding import Autoencoding
from dit.objectives.vq_autoencoding import VQAutoencoding

DOWN, UP = "DownEncoderBlock2D", "UpDecoderBlock2D"
NAMES = {
    "to_latent.": "encoder.",
    "to_pixels.": "decoder.",
    ".to_out.": ".to_out.0.",
    ".downsampler.": ".downsamplers.0.conv.",
    ".upsampler.": ".upsamplers.0.conv.",
    "codebook.entries": "quantize.embedding.weight",
}
"""Parts of names: ours, diffusers'."""


class DiffusersAutoencoder(DiffusersFormat[AutoencoderConfig]):
    """`AutoencoderKL`."""

    class_name = "AutoencoderKL"
    config_class = AutoencoderConfig
    other: Collection[str] = ("force_upcast", "scaling_factor")
    free = ("scaling_factor",)

    def describes(self, model: ModelConfig) -> bool:
        return super().describes(model) and not model.quantizes

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        halvings = len(published["block_out_channels"]) - 1
        return super().read_sizes(published) | {"patch_spatial": 2**halvings}

    def trained(self, model: AutoencoderConfig, published: Mapping[str, Any]) -> TrainedModel:
        objective, size = VQAutoencoding() if model.quantizes else Autoencoding(), published["sample_size"]
        return TrainedModel(model, objective, (1, size, size), {})

    def write_sizes(self, model: AutoencoderConfig, latent_size: LatentSize) -> dict[str, Any]:
        settings, default = super().write_sizes(model, latent_size), self.defaults["scaling_factor"]
        return settings | {
            "scaling_factor": default if model.scaling_factor is None else model.scaling_factor,
            "down_block_types": [DOWN] * len(model.block_out_channels),
            "up_block_types": [UP] * len(model.block_out_channels),
            "sample_size": latent_size[1],
        }

    def rules(self, model: AutoencoderConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        return RuleBook(shapes, [Rule(name, (renamed(name, NAMES),)) for name in shapes])


class DiffusersVQModel(DiffusersAutoencoder):
    """`VQModel`, whose entries are as wide as its latents."""

    class_name = "VQModel"
    other = (*DiffusersAutoencoder.other, "vq_embed_dim")
    same: Mapping[str, str] = {"codebook_size": "num_vq_embeddings"}

    def describes(self, model: ModelConfig) -> bool:
        return type(model) is self.config_class and model.quantizes

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        width, channels = published["vq_embed_dim"], published["latent_channels"]
        if width not in (None, channels):
            raise ConfigError(
                f"VQModel with vq_embed_dim={width} and latent_channels={channels}; ours has entries as wide as latents"
            )
        return super().read_sizes(published)

    def write_sizes(self, model: AutoencoderConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {"vq_embed_dim": model.latent_channels}
