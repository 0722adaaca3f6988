"""Convert diffusers' `AutoencoderKL` to and from our autoencoder.

The weights have the same shapes, and the same names except for the parts in `NAMES`. Scale and shift of the latents are
the settings `scaling_factor` and `shift_factor`. Models with other activations, other kinds of blocks, or per-channel
statistics are errors.

Source: diffusers 0.38, `models/autoencoders/autoencoder_kl.py`, names and settings.
"""

from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import DiffusersFormat, LatentSize, TrainedModel
from dit.convert.rules import Rule, RuleBook, Shape
from dit.errors import ConfigError
from dit.models.autoencoder.config import AutoencoderConfig
from dit.objectives.autoencoding import Autoencoding

DOWN, UP = "DownEncoderBlock2D", "UpDecoderBlock2D"
NAMES = {
    "to_latent.": "encoder.",
    "to_pixels.": "decoder.",
    ".to_out.": ".to_out.0.",
    ".downsampler.": ".downsamplers.0.conv.",
    ".upsampler.": ".upsamplers.0.conv.",
}
"""Parts of names: ours, diffusers'."""


class DiffusersAutoencoder(DiffusersFormat[AutoencoderConfig]):
    """`AutoencoderKL`."""

    class_name = "AutoencoderKL"
    config_class = AutoencoderConfig
    defaults: Mapping[str, Any] = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": (DOWN,),
        "up_block_types": (UP,),
        "block_out_channels": (64,),
        "layers_per_block": 1,
        "act_fn": "silu",
        "latent_channels": 4,
        "norm_num_groups": 32,
        "sample_size": 32,
        "scaling_factor": 0.18215,
        "shift_factor": None,
        "latents_mean": None,
        "latents_std": None,
        "force_upcast": True,
        "use_quant_conv": True,
        "use_post_quant_conv": True,
        "mid_block_add_attention": True,
    }
    fixed: Mapping[str, Any] = {
        "act_fn": "silu",
        "latents_mean": None,
        "latents_std": None,
        "use_quant_conv": True,
        "use_post_quant_conv": True,
    }

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        channels, size = list(published["block_out_channels"]), published["sample_size"]
        kinds = {*published["down_block_types"], *published["up_block_types"]}
        if kinds != {DOWN, UP} or published["in_channels"] != published["out_channels"]:
            raise ConfigError(
                f"{self.class_name} of blocks {', '.join(sorted(kinds))}, from {published['in_channels']} to "
                f"{published['out_channels']} channels; ours has {DOWN} and {UP}, and as many output as input channels"
            )
        same = ("in_channels", "latent_channels", "layers_per_block", "norm_num_groups", "mid_block_add_attention")
        model = AutoencoderConfig(
            patch_spatial=2 ** (len(channels) - 1),
            block_out_channels=channels,
            scaling_factor=published["scaling_factor"],
            shift_factor=published["shift_factor"],
            **{name: published[name] for name in same},
        )
        return TrainedModel(model, Autoencoding(), (1, size, size), {})

    def write(self, model: AutoencoderConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        resolutions = len(model.block_out_channels)
        scale = {} if model.scaling_factor is None else {"scaling_factor": model.scaling_factor}
        settings = {
            "in_channels": model.in_channels,
            "out_channels": model.in_channels,
            "down_block_types": [DOWN] * resolutions,
            "up_block_types": [UP] * resolutions,
            "block_out_channels": model.block_out_channels,
            "layers_per_block": model.layers_per_block,
            "latent_channels": model.latent_channels,
            "norm_num_groups": model.norm_num_groups,
            "mid_block_add_attention": model.mid_block_add_attention,
            "sample_size": latent_size[1],
            "shift_factor": model.shift_factor,
            **scale,
        }
        return settings, []

    def rules(self, model: AutoencoderConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        return RuleBook(shapes, [Rule(name, (_diffusers_name(name),)) for name in shapes])


def _diffusers_name(name: str) -> str:
    for part, replacement in NAMES.items():
        name = name.replace(part, replacement)
    return name
