"""Convert diffusers' models of FLUX's kind, whose tokens are patches of 2 x 2, to and from ours.

FLUX.1, Chroma, FLUX.2 and Qwen-Image. The guidance scale of a distilled network is an argument there, and a setting
(`guidance`) here.

Source: diffusers 0.38, `models/transformers/transformer_flux.py`, `transformer_chroma.py`, `transformer_flux2.py` and
`transformer_qwenimage.py`, `pipelines/flux2` and `pipelines/qwenimage`, names and settings; black-forest-labs/flux.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Optional

from dit.convert.diffusers_format import LatentSize, TrainedModel
from dit.convert.diffusers_streams import COMFYUI_ATTENTION, EMBEDDERS, FEED_FORWARD, JOINT, DiffusersTokens, Model
from dit.convert.rules import ONLY_SUPPORTED, Axes, ByHead, Form
from dit.errors import ConfigError
from dit.models.flux.config import FluxConfig
from dit.models.streams.families import ChromaConfig, Flux2Config, QwenImageConfig

DEV_GUIDANCE = 3.5
FLUX2_DEV_GUIDANCE = 4.0
KLEIN_GUIDANCE = 4.0  # of the models without distillation
BLOCKS = {
    **JOINT,
    **FEED_FORWARD,
    "single.#.modulation.linear": "single_transformer_blocks.#.norm.linear",
    "single.#.linear_in": "single_transformer_blocks.#.(attn.to_q|attn.to_k|attn.to_v|proj_mlp)",
    "single.#.linear_out": "single_transformer_blocks.#.proj_out",
    "single.#.(q|k)_layernorm": "single_transformer_blocks.#.attn.norm_(q|k)",
}


class Flux1Blocks(DiffusersTokens[Model]):
    """A class with the blocks of FLUX.1.

    The output projection of a single-stream block has all inputs of attention first, then all of the MLP; ours are
    ordered by head.
    """

    time_shift = 3.0
    comfyui: Mapping[str, str] = {
        **COMFYUI_ATTENTION,
        "img_in": "x_embedder",
        "double_blocks.#.(img|txt)_mlp.(0|2)": "transformer_blocks.#.ff(|_context).net.(0.proj|2)",
        "double_blocks.#.(img|txt)_mod.lin": "transformer_blocks.#.norm1(|_context).linear",
        "single_blocks.#.linear1": "single_transformer_blocks.#.(attn.to_q|attn.to_k|attn.to_v|proj_mlp)",
        "single_blocks.#.linear2": "single_transformer_blocks.#.proj_out",
        "single_blocks.#.modulation.lin": "single_transformer_blocks.#.norm.linear",
    }

    def forms(self, model: Model) -> Mapping[str, Form]:
        heads, size, share = model.num_attention_heads, model.head_size, model.ffn_size // model.num_attention_heads
        return {
            **super().forms(model),
            "single.#.linear_in": ByHead(heads, (size, size, size, share), turned=(0, 1)),
            "single.#.linear_out.weight": ByHead(heads, (size, share), fused=True, dim=1),
        }


class DiffusersFlux(Flux1Blocks[FluxConfig]):
    """`FluxTransformer2DModel`.

    A network with twice as many input as output channels reads a control picture (FLUX.1 Canny and Depth) after the
    latent.
    """

    class_name = "FluxTransformer2DModel"
    config_class = FluxConfig
    free = ("guidance",)
    names: Mapping[str, str] = {
        **BLOCKS,
        **EMBEDDERS,
        "conditioner.guidance.linear_(1|2)": "time_text_embed.guidance_embedder.linear_(1|2)",
    }
    sampling: Mapping[str, Any] = {"num_steps": 28, "guidance_scale": 1.0}

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        sizes = super().read_sizes(published)
        if sizes["in_channels"] == 2 * (channels := sizes["out_channels"] or 0):
            sizes |= {"in_channels": channels, "out_channels": None, "control_channels": channels}
        return sizes | {"guidance": DEV_GUIDANCE if published["guidance_embeds"] else None, "null_text": "learned"}

    def write_sizes(self, model: FluxConfig, latent_size: LatentSize) -> dict[str, Any]:
        if model.pooled_size is None:
            raise ConfigError(f"model.pooled_size=None, but {self.class_name} needs a pooled text; {ONLY_SUPPORTED}")
        settings = super().write_sizes(model, latent_size) | {"guidance_embeds": model.guidance is not None}
        if model.control_channels is not None:  # half of the input channels
            settings["out_channels"] = model.output_features
        return settings


APPROXIMATOR = ("approximator_num_channels", "approximator_hidden_dim", "approximator_layers")


class DiffusersChroma(Flux1Blocks[ChromaConfig]):
    """`ChromaTransformer2DModel`, whose guidance layer computes the modulations of all blocks."""

    class_name = "ChromaTransformer2DModel"
    config_class = ChromaConfig
    names: Mapping[str, str] = {
        **BLOCKS,
        "modulation.linear_(in|out)": "distilled_guidance_layer.(in|out)_proj",
        "modulation.blocks.#.norm": "distilled_guidance_layer.norms.#",
        "modulation.blocks.#.linear_(1|2)": "distilled_guidance_layer.layers.#.linear_(1|2)",
    }
    sampling: Mapping[str, Any] = {"num_steps": 35, "guidance_scale": 5.0}

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        return super().read_sizes(published) | {"approximator": [published[name] for name in APPROXIMATOR]}

    def write_sizes(self, model: ChromaConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | dict(zip(APPROXIMATOR, model.approximator))


class DiffusersFlux2(DiffusersTokens[Flux2Config]):
    """`Flux2Transformer2DModel`.

    A single block has one input matrix with q, k, v, gates and values in turn, and one output matrix with all inputs of
    attention first; ours are ordered by head. All gates of a SwiGLU come first; ours alternate with the values.
    """

    class_name = "Flux2Transformer2DModel"
    config_class = Flux2Config
    free = ("guidance",)
    names: Mapping[str, str] = {
        **JOINT,
        "conditioner.(time|guidance).linear_(1|2)": "time_guidance_embed.(timestep|guidance)_embedder.linear_(1|2)",
        "modulation.linear": "(double_stream_modulation_txt|double_stream_modulation_img|single_stream_modulation)"
        ".linear",
        "layers.#.(image|text).mlp.linear_fc(1|2)": "transformer_blocks.#.ff(|_context).linear_(in|out)",
        "single.#.linear_in": "single_transformer_blocks.#.attn.to_qkv_mlp_proj",
        "single.#.linear_out": "single_transformer_blocks.#.attn.to_out",
        "single.#.(q|k)_layernorm": "single_transformer_blocks.#.attn.norm_(q|k)",
    }
    time_shift = 7.5  # of the pipeline at 50 steps and 4096 tokens (exp(2.02))
    sampling: Mapping[str, Any] = {"num_steps": 50, "guidance_scale": 1.0}
    comfyui: Mapping[str, str] = {
        **COMFYUI_ATTENTION,
        "double_blocks.#.(img|txt)_mlp.(0|2)": "transformer_blocks.#.ff(|_context).linear_(in|out)",
        "single_blocks.#.linear1": "single_transformer_blocks.#.attn.to_qkv_mlp_proj",
        "single_blocks.#.linear2": "single_transformer_blocks.#.attn.to_out",
    }

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        guidance, null_text = (FLUX2_DEV_GUIDANCE, "learned") if published["guidance_embeds"] else (None, "empty")
        return super().read_sizes(published) | {"guidance": guidance, "null_text": null_text}

    def trained(self, model: Flux2Config, published: Mapping[str, Any]) -> TrainedModel:
        trained = super().trained(model, published)
        if model.guidance is not None:
            return trained
        return replace(trained, sampling={**trained.sampling, "guidance_scale": KLEIN_GUIDANCE})

    def write_sizes(self, model: Flux2Config, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {"guidance_embeds": model.guidance is not None}

    def forms(self, model: Flux2Config) -> Mapping[str, Form]:
        heads, size, share = model.num_attention_heads, model.head_size, model.ffn_size // model.num_attention_heads
        return {
            **super().forms(model),
            "modulation.linear": ByHead(1, tuple(n * 3 * model.hidden_size for n in (2, 2, 1))),
            "layers.#.(image|text).mlp.linear_fc1": Axes("(two f) ... -> (f two) ...", {"two": 2}),
            "single.#.linear_in": ByHead(
                heads, (size, size, size, share, share), turned=(0, 1), alternate=True, fused=True
            ),
            "single.#.linear_out": ByHead(heads, (size, share), fused=True, dim=1),
        }


class DiffusersQwenImage(DiffusersTokens[QwenImageConfig]):
    """`QwenImageTransformer2DModel`, without the further inputs of its layered models."""

    class_name = "QwenImageTransformer2DModel"
    config_class = QwenImageConfig
    same: Mapping[str, str] = {"clean_reference_time": "zero_cond_t"}
    names: Mapping[str, str] = {
        **JOINT,
        **EMBEDDERS,
        "embed.linear": "img_in",
        "embed_text": "txt_in",
        "text_norm": "txt_norm",
        "layers.#.(image|text).modulation.linear": "transformer_blocks.#.(img|txt)_mod.1",
        "layers.#.(image|text).mlp.linear_fc(1|2)": "transformer_blocks.#.(img|txt)_mlp.net.(0.proj|2)",
    }
    time_shift = 3.0
    sampling: Mapping[str, Any] = {"num_steps": 50, "guidance_scale": 4.0, "guidance_norm": True}

    def comfyui_name(self, layer: str) -> Optional[str]:
        return f"diffusion_model.{layer}" if layer.startswith("transformer_blocks.") else None

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        # `out_channels` counts the channels of a position; None stands for the channels of a token.
        sizes = super().read_sizes({**published, "out_channels": None})
        channels = published["out_channels"] or published["in_channels"]
        return sizes | {"out_channels": None if channels == sizes["in_channels"] else channels}

    def write_sizes(self, model: QwenImageConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {"out_channels": model.out_channels or model.in_channels}
