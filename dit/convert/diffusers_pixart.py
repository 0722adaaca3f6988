"""Convert diffusers' `PixArtTransformer2DModel` (PixArt-alpha and Sigma) to and from our ST-DiT with full attention.

Positions span `sample_size / patch_size / interpolation_scale` indices at every resolution, our `position_span`. Times
are steps 0 to 999, so `time_scale` must be 1000. The 1024 px model of PixArt-alpha is not supported, because it is
conditioned on resolution and aspect ratio.

Source: diffusers 0.38, `models/transformers/pixart_transformer_2d.py`, names and settings; Chen et al. 2023,
arXiv:2310.00426.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dit.convert.diffusers_format import (
    CROSS_ATTENTION,
    DiffusersFormat,
    LatentSize,
    TrainedModel,
    patches,
    square_side,
)
from dit.convert.original_dit import trained_objective
from dit.convert.rules import ByHead, Form
from dit.errors import ConfigError
from dit.layers.positions import sincos
from dit.models.stdit.config import STDiTConfig
from dit.patchify import grid_positions


class DiffusersPixArt(DiffusersFormat[STDiTConfig]):
    """`PixArtTransformer2DModel`."""

    class_name = "PixArtTransformer2DModel"
    aliases = ("Transformer2DModel",)
    config_class = STDiTConfig
    fixed = ("attention_bias", "activation_fn", "norm_type", "norm_elementwise_affine", "norm_eps", "attention_type")
    same: Mapping[str, str] = {
        "in_channels": "in_channels",
        "num_layers": "num_layers",
        "patch_spatial": "patch_size",
        "context_size": "caption_channels",
    }
    free = ("position_span",)
    only: Mapping[str, Any] = {"layer_pattern": ["full"], "fps_conditioning": False, "qk_layernorm": False}
    names: Mapping[str, str] = {
        **{name.replace(".attention", ".attentions.full"): layer for name, layer in CROSS_ATTENTION.items()},
        "embed.linear": "pos_embed.proj",
        "conditioner.time.linear_(1|2)": "adaln_single.emb.timestep_embedder.linear_(1|2)",
        "modulation.linear": "adaln_single.linear",
        "text_projection.linear_(1|2)": "caption_projection.linear_(1|2)",
        "layers.#.mlp.linear_fc(1|2)": "transformer_blocks.#.ff.net.(0.proj|2)",
    }
    sampling: Mapping[str, Any] = {"solver": "dpmpp_2m", "num_steps": 20, "guidance_scale": 4.5}
    comfyui: Mapping[str, str] = {
        "blocks.#.attn.qkv": "transformer_blocks.#.attn1.to_(q|k|v)",
        "blocks.#.attn.proj": "transformer_blocks.#.attn1.to_out.0",
        "blocks.#.cross_attn.q_linear": "transformer_blocks.#.attn2.to_q",
        "blocks.#.cross_attn.kv_linear": "transformer_blocks.#.attn2.to_(k|v)",
        "blocks.#.cross_attn.proj": "transformer_blocks.#.attn2.to_out.0",
        "blocks.#.mlp.fc(1|2)": "transformer_blocks.#.ff.net.(0.proj|2)",
    }

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        sizes, size = super().read_sizes(published), published["sample_size"]
        if published["use_additional_conditions"] is None:
            published = {**published, "use_additional_conditions": size == 128}
        self.check_published(published, use_additional_conditions=False, cross_attention_dim=sizes["hidden_size"])
        if published["caption_channels"] is None:
            raise ConfigError(f"{self.class_name} with caption_channels=None has no text projection; ours has one")
        # The default is an integer number of base resolutions.
        scale = published["interpolation_scale"]
        scale = max(size // 64, 1) if scale is None else scale
        return {**sizes, **self.only, "position_span": size // published["patch_size"] / scale}

    def trained(self, model: STDiTConfig, published: Mapping[str, Any]) -> TrainedModel:
        size = (1, published["sample_size"], published["sample_size"])
        return TrainedModel(model, trained_objective(model), size, self.sampling)

    def write(self, model: STDiTConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        settings, _ = super().write(model, latent_size)
        height, notes = square_side(self.class_name, latent_size, model.patch_spatial)
        side = height // model.patch_spatial
        if model.position_span is None:
            notes.append(f"positions are not scaled here; diffusers scales those of other sizes than {side} patches")
        settings |= {
            "cross_attention_dim": model.hidden_size,
            "interpolation_scale": 1 if model.position_span is None else side / model.position_span,
            "use_additional_conditions": False,
        }
        return settings, notes

    def forms(self, model: STDiTConfig) -> Mapping[str, Form]:
        three, two = (ByHead(model.num_attention_heads, (model.head_size,) * parts) for parts in (3, 2))
        return {
            "embed.linear.weight": patches("d c ph pw -> d (ph pw c)", model),
            "layers.#.attentions.full.linear_qkv": three,
            "layers.#.cross_attention.linear_kv": two,
        }

    def tables(self, model: STDiTConfig, latent_size: LatentSize) -> Mapping[str, Tensor]:
        side = square_side(self.class_name, latent_size, model.patch_spatial)[0] // model.patch_spatial
        scale = 1.0 if model.position_span is None else model.position_span / side
        table = sincos(grid_positions((1, side, side)) * scale, model.hidden_size, "sincos_2d")
        return {"pos_embed.pos_embed": table[None]}  # in old files
