"""Convert diffusers' `SD3Transformer2DModel` (Stable Diffusion 3 and 3.5) to and from our SD3.

A convolution embeds patches, and files have the table of positions, which our model computes. Heads do not rotate, so
their features have the same order. The text of the last block is modulated by scale, then shift.

Source: diffusers 0.38, `models/transformers/transformer_sd3.py` and `pipelines/stable_diffusion_3`, names and settings.
ComfyUI's names are those of Stability-AI/sd3.5, `mmditx.py`. The modulations of texts have none, because the last one
is ordered scale, then shift, only in diffusers.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dit.convert.diffusers_format import LatentSize, TrainedModel, patches
from dit.convert.diffusers_streams import EMBEDDERS, FEED_FORWARD, JOINT, DiffusersStreams
from dit.convert.original_dit import position_table
from dit.convert.rules import ONLY_SUPPORTED, Form, SwappedHalves
from dit.errors import ConfigError
from dit.models.streams.families import SD3Config


class DiffusersSD3(DiffusersStreams[SD3Config]):
    """`SD3Transformer2DModel`."""

    class_name = "SD3Transformer2DModel"
    config_class = SD3Config
    other = ("sample_size",)
    same: Mapping[str, str] = {"patch_spatial": "patch_size"}
    names: Mapping[str, str] = {
        **JOINT,
        **FEED_FORWARD,
        **EMBEDDERS,
        "embed.linear": "pos_embed.proj",
        "layers.#.image.dual_attention.linear_qkv": "transformer_blocks.#.attn2.to_(q|k|v)",
        "layers.#.image.dual_attention.linear_proj": "transformer_blocks.#.attn2.to_out.0",
        "layers.#.image.dual_attention.(q|k)_layernorm": "transformer_blocks.#.attn2.norm_(q|k)",
    }
    stored_tables = True
    time_shift = 3.0
    sampling: Mapping[str, Any] = {"num_steps": 28, "guidance_scale": 4.5}
    comfyui: Mapping[str, str] = {
        "joint_blocks.#.x_block.attn(|2).qkv": "transformer_blocks.#.attn(|2).to_(q|k|v)",
        "joint_blocks.#.x_block.attn(|2).proj": "transformer_blocks.#.attn(|2).to_out.0",
        "joint_blocks.#.(x|context)_block.mlp.fc(1|2)": "transformer_blocks.#.ff(|_context).net.(0.proj|2)",
        "joint_blocks.#.x_block.adaLN_modulation.1": "transformer_blocks.#.norm1.linear",
        "joint_blocks.#.context_block.attn.qkv": "transformer_blocks.#.attn.add_(q|k|v)_proj",
        "joint_blocks.#.context_block.attn.proj": "transformer_blocks.#.attn.to_add_out",
    }

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        return super().read_sizes(published) | {
            "num_dual_layers": len(published["dual_attention_layers"]),
            "qk_layernorm": published["qk_norm"] is not None,
            "position_crop": [published["pos_embed_max_size"], published["sample_size"] // published["patch_size"]],
        }

    def trained(self, model: SD3Config, published: Mapping[str, Any]) -> TrainedModel:
        side = published["sample_size"] // model.patch_spatial * model.patch_spatial
        return super().trained(model, {**published, "sample_size": side})

    def write_sizes(self, model: SD3Config, latent_size: LatentSize) -> dict[str, Any]:
        if model.pooled_size is None or model.position_crop is None:
            raise ConfigError(
                f"model.pooled_size={model.pooled_size} and model.position_crop={model.position_crop}, but "
                f"{self.class_name} needs a pooled text and cropped positions; {ONLY_SUPPORTED}"
            )
        side, span = model.position_crop
        return super().write_sizes(model, latent_size) | {
            "sample_size": span * model.patch_spatial,
            "caption_projection_dim": model.hidden_size,
            "pos_embed_max_size": side,
            "dual_attention_layers": list(range(model.num_dual_layers)),
            "qk_norm": "rms_norm" if model.qk_layernorm else None,
        }

    def forms(self, model: SD3Config) -> Mapping[str, Form]:
        return {
            **super().forms(model),
            "embed.linear.weight": patches("d c ph pw -> d (ph pw c)", model),
            f"layers.{model.num_joint_layers - 1}.text.modulation.linear": SwappedHalves(),
        }

    def tables(self, model: SD3Config, latent_size: LatentSize) -> Mapping[str, Tensor]:
        side, span = model.position_crop or (1, 1)
        return {"pos_embed.pos_embed": position_table(model.hidden_size, side, side / span)}
