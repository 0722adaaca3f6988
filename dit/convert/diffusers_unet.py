"""Convert diffusers' `UNet2DConditionModel` (Stable Diffusion v1 and XL) to and from our latent-diffusion UNet.

If all resolutions have the same number of heads, the projections around a transformer are 1 x 1 convolutions. Stable
Diffusion replaces a dropped text by the embedding of the empty text (XL: zeros), our `null_text`, and attends to the
padding of all texts (`:padded` of `--text-encoder`). Input channels in excess of the output channels are our control
picture, after the latent. Models with other blocks, with other conditions than time, text, and SDXL's pooled text and
lengths, or with heads of different sizes are not supported.

Source: diffusers 0.38, `models/unets/unet_2d_condition.py`, names and settings.
"""

import re
from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import (
    NULLS,
    DiffusersFormat,
    LatentSize,
    TrainedModel,
    learned_nulls,
    square_side,
)
from dit.convert.rules import POINTWISE, ByHead, Rule, RuleBook, Shape, renamed
from dit.errors import ConfigError
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.ldm_unet.layer import LENGTH_FEATURES, LENGTHS
from dit.objectives.ddpm import DDPM

DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
"""Names of blocks without and with transformers."""
NAMES = {
    "time.": "time_embedding.",
    "added.": "add_embedding.",
    ".condition.": ".time_emb_proj.",
    ".downsampler.": ".downsamplers.0.conv.",
    ".upsampler.": ".upsamplers.0.conv.",
    ".to_out.": ".to_out.0.",
    ".ff.proj.": ".ff.net.0.proj.",
    ".ff.out.": ".ff.net.2.",
}
"""Parts of names that differ: ours, diffusers'."""
ADDED = {"addition_embed_type": "text_time", "addition_time_embed_dim": LENGTH_FEATURES}
"""Settings of diffusers for a pooled text and six lengths."""


class DiffusersUNet(DiffusersFormat[LDMUNetConfig]):
    """`UNet2DConditionModel`."""

    class_name = "UNet2DConditionModel"
    config_class = LDMUNetConfig
    other = ("dropout", "upcast_attention", "addition_embed_type_num_heads", "transformer_layers_per_block")
    same: Mapping[str, str] = {"in_channels": "out_channels", "context_size": "cross_attention_dim"}
    free = ("num_attention_heads",)
    part = "unet"

    def comfyui_name(self, layer: str) -> str:
        """Return the name in kohya-ss, which ComfyUI reads for this model."""
        return f"lora_unet_{layer.replace('.', '_')}"

    def other_names(self, layer: str, model: LDMUNetConfig) -> list[str]:
        """Return the name of an SDXL layer in kohya-ss, which numbers blocks like the original code."""
        if layer.startswith("mid_block.attentions.0."):
            block = "middle_block_1"
        elif match := re.match(r"(down|up)_blocks\.(\d+)\.attentions\.(\d+)\.", layer):
            resolution, place = int(match[2]), int(match[3])
            if match[1] == "down":  # the first convolution, then the blocks and the downsampler of each resolution
                block = f"input_blocks_{1 + resolution * (model.layers_per_block + 1) + place}_1"
            else:
                block = f"output_blocks_{resolution * (model.layers_per_block + 1) + place}_1"
        else:
            return []
        suffix = re.sub(r"^(mid_block|\w+_blocks\.\d+)\.attentions\.\d+\.", "", layer)
        return [f"lora_unet_{block}_{suffix.replace('.', '_')}"]

    def trained(self, model: LDMUNetConfig, published: Mapping[str, Any]) -> TrainedModel:
        if published["out_channels"] > published["in_channels"]:
            raise ConfigError(
                f"out_channels={published['out_channels']} is above in_channels={published['in_channels']}; our "
                "network has at least as many input as output channels, so such weights cannot be imported"
            )
        if model.control_channels == model.in_channels + 1:
            raise ConfigError(
                f"in_channels={published['in_channels']} are those of an inpainting model: latent, mask and masked "
                "picture; the mask is not supported, use the text-to-image model"
            )
        if model.pooled_size is not None and model.pooled_size + LENGTH_FEATURES == model.context_size:
            inputs = published["projection_class_embeddings_input_dim"]
            raise ConfigError(
                f"projection_class_embeddings_input_dim={inputs} is that of the refiner of Stable Diffusion XL: a "
                "pooled text and five numbers, with an aesthetic score; use the base model, which has sizes and crops"
            )
        objective = DDPM(schedule="scaled_linear", discrete_steps=1000, prediction="noise")
        sampling = {"solver": "ddim", "num_steps": 50, "guidance_scale": 7.5 if model.pooled_size is None else 5.0}
        size = (1, published["sample_size"], published["sample_size"])
        return TrainedModel(model, objective, size, sampling)

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        channels, depths = published["block_out_channels"], published["transformer_layers_per_block"]
        depths = [depths] * len(channels) if isinstance(depths, int) else depths
        if len(depths) != len(channels) or not all(isinstance(depth, int) for depth in depths):
            raise ConfigError(
                f"transformer_layers_per_block={depths}: ours has one number for each of {len(channels)} resolutions; "
                "such weights cannot be imported"
            )
        with_text = [kind == DOWN[1] for kind in published["down_block_types"]]
        # In spite of its name, `attention_head_dim` is the number of heads.
        heads, inputs = published["attention_head_dim"], published["projection_class_embeddings_input_dim"]
        names = ("in_channels", "out_channels", "layers_per_block", "cross_attention_dim", "sample_size")
        numbers = {name: published[name] for name in (*names, "norm_num_groups")}
        if not isinstance(heads, list):
            numbers["attention_head_dim"] = heads
        if wrong := [f"{name}={value!r}" for name, value in numbers.items() if not isinstance(value, int)]:
            cure = "weights with such settings cannot be imported"
            if not isinstance(published["sample_size"], int):
                cure = f"set sample_size in config.json to the side of the latents; other {cure}"
            raise ConfigError(f"{self.class_name} with {', '.join(wrong)}: each must be one integer; {cure}")
        head_size = channels[-1] // heads[-1] if isinstance(heads, list) else None
        has_pooled = {name: published[name] for name in ADDED} == ADDED
        pooled = inputs - LENGTHS * LENGTH_FEATURES if has_pooled else None
        return {
            **{ours: published[theirs] for ours, theirs in self.equal.items()},
            "control_channels": max(0, published["in_channels"] - published["out_channels"]) or None,
            "transformer_layers": [depth if has else 0 for depth, has in zip(depths, with_text)],
            "mid_transformer_layers": depths[-1],
            "num_attention_heads": 8 if head_size is not None else heads,
            "head_size": head_size,
            "pooled_size": pooled,
            "null_text": "empty" if pooled is None else "zeros",
        }

    def notes(self, model: LDMUNetConfig, latent_size: LatentSize) -> list[str]:
        return square_side(self.class_name, latent_size, 2**model.halvings)[1]

    def write_sizes(self, model: LDMUNetConfig, latent_size: LatentSize) -> dict[str, Any]:
        layers, bottom = model.transformer_layers, model.mid_transformer_layers
        depths = [depth or bottom or 1 for depth in layers]
        settings = {
            **{theirs: getattr(model, ours) for ours, theirs in self.equal.items()},
            "num_attention_heads": None,
            "sample_size": square_side(self.class_name, latent_size, 2**model.halvings)[0],
            "in_channels": model.input_features,
            "down_block_types": [DOWN[depth > 0] for depth in layers],
            "up_block_types": [UP[depth > 0] for depth in reversed(layers)],
            "transformer_layers_per_block": bottom if set(depths) == {bottom} else depths,
            "attention_head_dim": model.num_attention_heads,
        }
        if model.head_size is not None:
            heads = [channels // model.head_size for channels in model.block_out_channels]
            settings |= {"attention_head_dim": heads, "use_linear_projection": True}
        if model.pooled_size is not None:
            inputs = model.pooled_size + LENGTHS * LENGTH_FEATURES
            settings |= {**ADDED, "projection_class_embeddings_input_dim": inputs}
        return settings

    def rules(self, model: LDMUNetConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        linear = model.head_size is not None
        rules = [_rule(name, shapes[name], linear=linear) for name in shapes if name not in NULLS]
        return RuleBook(shapes, rules, unmatched=learned_nulls(shapes))


def _rule(name: str, shape: Shape, *, linear: bool) -> Rule:
    diffusers_name = renamed(name, NAMES)
    if fused := re.fullmatch(r"(.*)\.to_(qkv|kv)\.weight", diffusers_name):
        parts = fused[2]
        return Rule(
            name,
            tuple(f"{fused[1]}.to_{part}.weight" for part in parts),
            ByHead(1, (shape[0] // len(parts),) * len(parts)),  # ordered by part; a part has all heads
        )
    if not linear and re.search(r"\.proj_(in|out)\.weight", diffusers_name):
        return Rule(name, (diffusers_name,), POINTWISE)
    return Rule(name, (diffusers_name,))
