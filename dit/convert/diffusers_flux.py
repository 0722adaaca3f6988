"""Convert diffusers' `FluxTransformer2DModel` (FLUX.1) and `ChromaTransformer2DModel` to and from our models.

Differences of diffusers' models, besides those in `dit.convert.diffusers_streams`:

* in single-stream blocks, the matrix of the MLP is separate, too; their output projection has all inputs of attention
  first, then all of the MLP, while ours are ordered by head;
* the guidance scale of a distilled network is an argument, and a setting (`guidance`) here. Times and guidance are the
  same; both code bases multiply by 1000;
* a network with twice as many input as output channels reads a control picture (FLUX.1 Canny and Depth), whose channels
  follow those of the latent in both code bases.

Source: diffusers 0.38, `models/transformers/transformer_flux.py` and `transformer_chroma.py`, names and settings;
black-forest-labs/flux.
"""

from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import LatentSize, TrainedModel
from dit.convert.diffusers_streams import (
    COMFYUI_ATTENTION,
    IMAGE,
    PATCH,
    PATCH_SIZES,
    TEXT,
    DiffusersStreams,
    Model,
    StreamNames,
    head_norms,
    outer_names,
)
from dit.convert.rules import TRAIN_THAT_WAY, Axes, ByHead, Form, Rule, with_bias
from dit.errors import ConfigError
from dit.models.chroma.config import ChromaConfig
from dit.models.flux.config import FluxConfig

DEV_GUIDANCE = 3.5


class Flux1Blocks(DiffusersStreams[Model]):
    """A class with the blocks of FLUX.1."""

    fixed = ("patch_size",)
    streams: Mapping[str, StreamNames] = {
        "image": IMAGE("ff.net.0.proj", "ff.net.2", "norm1.linear"),
        "text": TEXT("ff_context.net.0.proj", "ff_context.net.2", "norm1_context.linear"),
    }
    comfyui = (
        *COMFYUI_ATTENTION,
        ("x_embedder", "img_in"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj", r"double_blocks.\1.img_mlp.0"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.2", r"double_blocks.\1.img_mlp.2"),
        (r"transformer_blocks\.(\d+)\.norm1\.linear", r"double_blocks.\1.img_mod.lin"),
        (r"transformer_blocks\.(\d+)\.ff_context\.net\.0\.proj", r"double_blocks.\1.txt_mlp.0"),
        (r"transformer_blocks\.(\d+)\.ff_context\.net\.2", r"double_blocks.\1.txt_mlp.2"),
        (r"transformer_blocks\.(\d+)\.norm1_context\.linear", r"double_blocks.\1.txt_mod.lin"),
        (r"single_transformer_blocks\.(\d+)\.(?:attn\.to_[qkv]|proj_mlp)", r"single_blocks.\1.linear1"),
        (r"single_transformer_blocks\.(\d+)\.proj_out", r"single_blocks.\1.linear2"),
        (r"single_transformer_blocks\.(\d+)\.norm\.linear", r"single_blocks.\1.modulation.lin"),
    )

    def sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        channels, out_channels = published["in_channels"], published["out_channels"]
        if (out_channels or 0) % PATCH**2:
            raise ConfigError(f"out_channels={out_channels} must be a multiple of {PATCH**2}, the positions of a patch")
        sizes = super().sizes(published)
        return sizes | {
            "out_channels": None if out_channels in (None, channels) else out_channels // PATCH**2,
            "num_single_layers": published["num_single_layers"],
            "ffn_hidden_size": 4 * sizes["hidden_size"],
        }

    def write_sizes(self, model: Model) -> dict[str, Any]:
        return super().write_sizes(model) | {
            "out_channels": None if model.output_features == model.token_channels else model.output_features,
            "num_single_layers": model.num_single_layers,
        }

    def single(self, model: Model, layer: str, block: str) -> list[Rule]:
        heads, size, share = model.num_attention_heads, model.head_size, model.ffn_size // model.num_attention_heads
        inward = ByHead(heads, (size, size, size, share), turned=(0, 1))
        outward = ByHead(heads, (size, share), fused=True, dim=1)
        parts = [f"{block}.attn.to_q", f"{block}.attn.to_k", f"{block}.attn.to_v", f"{block}.proj_mlp"]
        return [
            *with_bias(f"{layer}.modulation.linear", f"{block}.norm.linear"),
            *with_bias(f"{layer}.linear_in", *parts, form=inward),
            Rule(f"{layer}.linear_out.weight", (f"{block}.proj_out.weight",), outward),
            Rule(f"{layer}.linear_out.bias", (f"{block}.proj_out.bias",)),
            *head_norms(layer, f"{block}.attn.norm_q", f"{block}.attn.norm_k"),
        ]


class DiffusersFlux(Flux1Blocks[FluxConfig]):
    """`FluxTransformer2DModel`."""

    class_name = "FluxTransformer2DModel"
    config_class = FluxConfig
    names: Mapping[str, str] = outer_names("time_text_embed", time="timestep", pooled="text", guidance="guidance")
    free = frozenset({"num_single_layers", "pooled_size", "guidance", "control_channels"})

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        pooled, guidance = published["pooled_projection_dim"], DEV_GUIDANCE if published["guidance_embeds"] else None
        sizes = self.sizes(published)
        if sizes["in_channels"] == 2 * (channels := sizes["out_channels"] or 0):
            sizes |= {"in_channels": channels, "out_channels": None, "control_channels": channels}
        elif sizes["in_channels"] > channels > 0:
            raise ConfigError(
                f"in_channels={published['in_channels']} is above out_channels={published['out_channels']}: this "
                "network also reads a mask or other pictures (inpainting), which FluxConfig does not; use the "
                "text-to-image network"
            )
        model = FluxConfig(**sizes, pooled_size=pooled, guidance=guidance)
        return self.trained(model, time_shift=3.0, num_steps=28)

    def write(self, model: FluxConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        if model.pooled_size is None:
            raise ConfigError(f"model.pooled_size=None, but {self.class_name} needs a pooled text; {TRAIN_THAT_WAY}")
        settings = self.write_sizes(model) | {"in_channels": model.input_features}
        if model.control_channels is not None:
            if (model.control_channels, model.output_features) != (model.in_channels, model.token_channels):
                raise ConfigError(
                    f"model.control_channels={model.control_channels} and model.out_channels={model.out_channels}, but "
                    f"a {self.class_name} with a control picture has model.in_channels={model.in_channels} for both; "
                    f"{TRAIN_THAT_WAY}"
                )
            settings["out_channels"] = model.output_features
        added = {"pooled_projection_dim": model.pooled_size, "guidance_embeds": model.guidance is not None}
        return settings | added, []

    def forms(self, model: FluxConfig) -> Mapping[str, Form]:
        parts = PATCH_SIZES | {"parts": 1 if model.control_channels is None else 2}
        return {**super().forms(model), "embed.linear.weight": Axes("d (parts c ph pw) -> d (parts ph pw c)", parts)}


APPROXIMATOR = ("approximator_num_channels", "approximator_hidden_dim", "approximator_layers")


class DiffusersChroma(Flux1Blocks[ChromaConfig]):
    """`ChromaTransformer2DModel`, whose guidance layer computes the modulations of all blocks."""

    class_name = "ChromaTransformer2DModel"
    config_class = ChromaConfig
    names: Mapping[str, str] = outer_names("") | {
        "modulation.linear_in": "distilled_guidance_layer.in_proj",
        "modulation.linear_out": "distilled_guidance_layer.out_proj",
    }
    free = frozenset({"num_single_layers", "approximator"})

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        approximator = [published[name] for name in APPROXIMATOR]
        model = ChromaConfig(**self.sizes(published), approximator=approximator, null_text="empty")
        return self.trained(model, time_shift=3.0, num_steps=35, guidance_scale=5.0)

    def write(self, model: ChromaConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        return self.write_sizes(model) | dict(zip(APPROXIMATOR, model.approximator)), []

    def shared(self, model: ChromaConfig) -> list[Rule]:
        rules = list[Rule]()
        for i in range(model.approximator[-1]):
            ours, theirs = f"modulation.blocks.{i}", "distilled_guidance_layer"
            rules.append(Rule(f"{ours}.norm.weight", (f"{theirs}.norms.{i}.weight",)))
            for linear in ("linear_1", "linear_2"):
                rules += with_bias(f"{ours}.{linear}", f"{theirs}.layers.{i}.{linear}")
        return rules
