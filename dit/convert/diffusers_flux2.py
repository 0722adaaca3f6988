"""Convert diffusers' `Flux2Transformer2DModel` (FLUX.2) to and from our FLUX.2.

A single block has one input matrix with q, k, v, gates and values in turn, and one output matrix with all inputs of
attention first; ours are ordered by head. All gates of a SwiGLU come first; ours alternate with the values.

Source: diffusers 0.38, `models/transformers/transformer_flux2.py` and `pipelines/flux2`, names and settings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dit.convert.diffusers_format import LatentSize, TrainedModel
from dit.convert.diffusers_streams import COMFYUI_ATTENTION, JOINT, DiffusersTokens, embedder_names
from dit.convert.rules import Axes, ByHead, Form
from dit.models.flux2.config import Flux2Config

DEV_GUIDANCE = 4.0
KLEIN_GUIDANCE = 4.0  # of the models without distillation


class DiffusersFlux2(DiffusersTokens[Flux2Config]):
    """`Flux2Transformer2DModel`."""

    class_name = "Flux2Transformer2DModel"
    config_class = Flux2Config
    fixed = ("patch_size", "out_channels", "timestep_guidance_channels")
    same: Mapping[str, str] = {
        **DiffusersTokens.same,
        "num_single_layers": "num_single_layers",
        "rope_theta": "rope_theta",
        "layernorm_epsilon": "eps",
    }
    free = ("in_channels", "guidance")
    names: Mapping[str, str] = {
        **JOINT,
        **embedder_names("time_guidance_embed", time="timestep", guidance="guidance"),
        "modulation.linear": "(double_stream_modulation_txt|double_stream_modulation_img|single_stream_modulation)"
        ".linear",
        "layers.#.image.mlp.linear_fc(1|2)": "transformer_blocks.#.ff.linear_(in|out)",
        "layers.#.text.mlp.linear_fc(1|2)": "transformer_blocks.#.ff_context.linear_(in|out)",
        "single.#.linear_in": "single_transformer_blocks.#.attn.to_qkv_mlp_proj",
        "single.#.linear_out": "single_transformer_blocks.#.attn.to_out",
        "single.#.(q|k)_layernorm": "single_transformer_blocks.#.attn.norm_(q|k)",
    }
    time_shift = 7.5  # of the pipeline at 50 steps and 4096 tokens (exp(2.02))
    sampling: Mapping[str, Any] = {"num_steps": 50, "guidance_scale": 1.0}
    comfyui: Mapping[str, str] = {
        **COMFYUI_ATTENTION,
        "double_blocks.#.img_mlp.(0|2)": "transformer_blocks.#.ff.linear_(in|out)",
        "double_blocks.#.txt_mlp.(0|2)": "transformer_blocks.#.ff_context.linear_(in|out)",
        "single_blocks.#.linear1": "single_transformer_blocks.#.attn.to_qkv_mlp_proj",
        "single_blocks.#.linear2": "single_transformer_blocks.#.attn.to_out",
    }

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        guidance, null_text = (DEV_GUIDANCE, "learned") if published["guidance_embeds"] else (None, "empty")
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
