"""Convert diffusers' `AutoencoderKL` and `VQModel` to and from our autoencoder.

Models with other activations, other kinds of blocks, or per-channel statistics are errors.

Source: diffusers 0.38, `models/autoencoders/autoencoder_kl.py` and `vq_model.py`, names and settings.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
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
SAME = ("in_channels", "latent_channels", "layers_per_block", "norm_num_groups", "mid_block_add_attention")
"""Settings with the same name and value in diffusers."""


class DiffusersAutoencoder(DiffusersFormat[AutoencoderConfig]):
    """`AutoencoderKL`."""

    class_name = "AutoencoderKL"
    config_class = AutoencoderConfig
    other: Collection[str] = ("force_upcast", "scaling_factor")

    def describes(self, model: ModelConfig) -> bool:
        return super().describes(model) and not model.quantizes

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        channels, size = published["block_out_channels"], published["sample_size"]
        model = AutoencoderConfig(
            patch_spatial=2 ** (len(channels) - 1),
            block_out_channels=channels,
            scaling_factor=published["scaling_factor"],
            shift_factor=published["shift_factor"],
            **{name: published[name] for name in SAME},
        )
        return TrainedModel(model, Autoencoding(), (1, size, size), {})

    def write(self, model: AutoencoderConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        resolutions = len(model.block_out_channels)
        scale = {} if model.scaling_factor is None else {"scaling_factor": model.scaling_factor}
        settings = {
            **{name: getattr(model, name) for name in SAME},
            "out_channels": model.in_channels,
            "down_block_types": [DOWN] * resolutions,
            "up_block_types": [UP] * resolutions,
            "block_out_channels": model.block_out_channels,
            "sample_size": latent_size[1],
            "shift_factor": model.shift_factor,
            **scale,
        }
        return settings, []

    def rules(self, model: AutoencoderConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        return RuleBook(shapes, [Rule(name, (renamed(name, NAMES),)) for name in shapes])


class DiffusersVQModel(DiffusersAutoencoder):
    """`VQModel`, whose entries are as wide as its latents."""

    class_name = "VQModel"
    other = (*DiffusersAutoencoder.other, "vq_embed_dim")

    def describes(self, model: ModelConfig) -> bool:
        return type(model) is self.config_class and model.quantizes

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        width, channels = published["vq_embed_dim"], published["latent_channels"]
        if width not in (None, channels):
            raise ConfigError(
                f"VQModel with vq_embed_dim={width} and latent_channels={channels}; ours has entries as wide as latents"
            )
        trained = super().read({**published, "shift_factor": None})
        assert isinstance(trained.model, AutoencoderConfig)
        model = replace(trained.model, codebook_size=published["num_vq_embeddings"])
        return replace(trained, model=model, objective=VQAutoencoding())

    def write(self, model: AutoencoderConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        settings, notes = super().write(model, latent_size)
        del settings["shift_factor"]
        codebook = {"num_vq_embeddings": model.codebook_size, "vq_embed_dim": model.latent_channels}
        return settings | codebook, notes
