"""Convert diffusers' models of one token stream with cross-attention to and from ours: PixArt, SANA and Wan.

Times are steps up to 1000, so `time_scale` must be 1000.

Source: diffusers 0.38, `models/transformers/pixart_transformer_2d.py`, `sana_transformer.py` and `transformer_wan.py`,
names and settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dit.convert.diffusers_format import DiffusersFormat, LatentSize, patches, square_side
from dit.convert.original_dit import position_table, trained_objective
from dit.convert.rules import POINTWISE, SAME, Axes, ByHead, Form
from dit.errors import ConfigError
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.wan.config import WanConfig
from dit.objectives.base import Objective

CROSS_ATTENTION = {
    "layers.#.attention.linear_qkv": "transformer_blocks.#.attn1.to_(q|k|v)",
    "layers.#.attention.linear_proj": "transformer_blocks.#.attn1.to_out.0",
    "layers.#.cross_attention.linear_q": "transformer_blocks.#.attn2.to_q",
    "layers.#.cross_attention.linear_kv": "transformer_blocks.#.attn2.to_(k|v)",
    "layers.#.cross_attention.linear_proj": "transformer_blocks.#.attn2.to_out.0",
    "layers.#.modulation.table": "transformer_blocks.#.scale_shift_table",
    "head.table": "scale_shift_table",
    "head.linear": "proj_out",
}
"""Names of attention, modulation and head."""


class DiffusersPixArt(DiffusersFormat[STDiTConfig]):
    """`PixArtTransformer2DModel` (PixArt-alpha and Sigma), our ST-DiT with full attention.

    Positions span `sample_size / patch_size / interpolation_scale` indices at every resolution, our `position_span`.
    The 1024 px model of PixArt-alpha is not supported, because it is conditioned on resolution and aspect ratio.

    Source: also Chen et al. 2023, arXiv:2310.00426.
    """

    class_name = "PixArtTransformer2DModel"
    aliases = ("Transformer2DModel",)
    config_class = STDiTConfig
    other = (
        *("dropout", "norm_num_groups", "num_embeds_ada_norm", "upcast_attention", "interpolation_scale"),
        "use_additional_conditions",
    )
    same: Mapping[str, str] = {"patch_spatial": "patch_size"}
    free = ("position_span",)
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
        conditioned = published["use_additional_conditions"]
        if size == 128 if conditioned is None else conditioned:
            raise ConfigError("use_additional_conditions=True: PixArt-alpha of 1024 px reads sizes; use PixArt-Sigma")
        if published["caption_channels"] is None:
            raise ConfigError(
                f"caption_channels=None (our context_size): only a {self.class_name} with texts can be converted"
            )
        # The default is an integer number of base resolutions.
        scale = published["interpolation_scale"]
        scale = max(size // 64, 1) if scale is None else scale
        ours = {"layer_pattern": ["full"], "fps_conditioning": False, "qk_layernorm": False}
        return {**sizes, **ours, "position_span": size // published["patch_size"] / scale}

    def objective(self, model: STDiTConfig) -> Objective:
        return trained_objective(model)

    def notes(self, model: STDiTConfig, latent_size: LatentSize) -> list[str]:
        height, notes = square_side(self.class_name, latent_size, model.patch_spatial)
        if model.position_span is None:
            side = height // model.patch_spatial
            notes.append(f"positions are not scaled here; diffusers scales those of other sizes than {side} patches")
        return notes

    def write_sizes(self, model: STDiTConfig, latent_size: LatentSize) -> dict[str, Any]:
        settings = super().write_sizes(model, latent_size)
        side = settings["sample_size"] // model.patch_spatial
        return settings | {
            "cross_attention_dim": model.hidden_size,
            "interpolation_scale": 1 if model.position_span is None else side / model.position_span,
            "use_additional_conditions": False,
        }

    def forms(self, model: STDiTConfig) -> Mapping[str, Form]:
        return {**super().forms(model), "embed.linear.weight": patches("d c ph pw -> d (ph pw c)", model)}

    def tables(self, model: STDiTConfig, latent_size: LatentSize) -> Mapping[str, Tensor]:
        side = square_side(self.class_name, latent_size, model.patch_spatial)[0] // model.patch_spatial
        divisor = 1.0 if model.position_span is None else side / model.position_span
        return {"pos_embed.pos_embed": position_table(model.hidden_size, side, divisor)}  # in old files


FULL_WIDTH = "rms_norm_across_heads"


@dataclass(frozen=True)
class GatesSecond(Form):
    """External rows are all values, then all gates; in the parameter they alternate (see `GatedConvolution`).

    `pointwise`: the external weight is a 1 x 1 convolution.
    """

    pointwise: bool = False

    def from_external(self, tensors: Sequence[Tensor]) -> Tensor:
        pairs = super().from_external(tensors)
        return pairs.flatten(1) if self.pointwise and pairs.dim() > 1 else pairs

    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        gates, values = parameter.unflatten(0, (-1, 2)).unbind(1)
        external = torch.cat([values, gates])
        return (external[..., None, None] if self.pointwise and parameter.dim() > 1 else external,)


class DiffusersSana(DiffusersFormat[SanaConfig]):
    """`SanaTransformer2DModel` (SANA and SANA 1.5).

    Linear layers of the feed-forward are convolutions of 1 x 1, and its channels are ordered values, then gates. Models
    with positions (4096 px) or a guidance input (SANA-Sprint) are not supported.

    Source: also Xie et al. 2024, arXiv:2410.10629.
    """

    class_name = "SanaTransformer2DModel"
    config_class = SanaConfig
    other = ("guidance_embeds_scale",)
    same: Mapping[str, str] = {"patch_spatial": "patch_size"}
    names: Mapping[str, str] = {
        **CROSS_ATTENTION,
        "embed.linear": "patch_embed.proj",
        "conditioner.time.linear_(1|2)": "time_embed.emb.timestep_embedder.linear_(1|2)",
        "modulation.linear": "time_embed.linear",
        "text_projection.linear_(1|2)": "caption_projection.linear_(1|2)",
        "text_projection.norm": "caption_norm",
        "layers.#.(attention|cross_attention).(q|k)_layernorm": "transformer_blocks.#.attn(1|2).norm_(q|k)",
        "layers.#.mlp.linear_fc(1|2)": "transformer_blocks.#.ff.conv_(inverted|point)",
        "layers.#.mlp": "transformer_blocks.#.ff.conv_depth",
    }
    time_shift = 3.0
    sampling: Mapping[str, Any] = {"num_steps": 20, "guidance_scale": 4.5}

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        return super().read_sizes(published) | {"qk_layernorm": published["qk_norm"] is not None}

    def write_sizes(self, model: SanaConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {
            "cross_attention_head_dim": model.hidden_size // model.num_cross_attention_heads,
            "cross_attention_dim": model.hidden_size,
            "qk_norm": FULL_WIDTH if model.qk_layernorm else None,
        }

    def forms(self, model: SanaConfig) -> Mapping[str, Form]:
        cross_heads = model.num_cross_attention_heads
        return {
            **super().forms(model),
            "embed.linear.weight": patches("d c ph pw -> d (ph pw c)", model),
            "layers.#.cross_attention.linear_kv": ByHead(cross_heads, (model.hidden_size // cross_heads,) * 2),
            "layers.#.mlp.linear_fc1": GatesSecond(pointwise=True),
            "layers.#.mlp": GatesSecond(),
            "layers.#.mlp.linear_fc2": POINTWISE,
        }


class DiffusersWan(DiffusersFormat[WanConfig]):
    """`WanTransformer3DModel` (Wan 2.1 text to video).

    Features that rotate together are adjacent in diffusers; ours have a distance of half a head. A predicted patch is
    ordered by frame, then row; ours by row, then frame. Models that read an image (`image_dim`, `added_kv_proj_dim`)
    are not supported.

    Source: also Wan Team 2025, arXiv:2503.20314.
    """

    class_name = "WanTransformer3DModel"
    config_class = WanConfig
    other = ("rope_max_seq_len",)
    same: Mapping[str, str] = {"ffn_hidden_size": "ffn_dim"}
    names: Mapping[str, str] = {
        **{name: layer.replace("transformer_blocks", "blocks") for name, layer in CROSS_ATTENTION.items()},
        "embed.linear": "patch_embedding",
        "conditioner.time.linear_(1|2)": "condition_embedder.time_embedder.linear_(1|2)",
        "modulation.linear": "condition_embedder.time_proj",
        "text_projection.linear_(1|2)": "condition_embedder.text_embedder.linear_(1|2)",
        "layers.#.(attention|cross_attention).(q|k)_layernorm": "blocks.#.attn(1|2).norm_(q|k)",
        "layers.#.cross_norm": "blocks.#.norm2",
        "layers.#.mlp.linear_fc(1|2)": "blocks.#.ffn.net.(0.proj|2)",
    }
    latent_size = (21, 60, 104)  # 81 frames of 480 x 832; not in the settings
    time_shift = 3.0
    sampling: Mapping[str, Any] = {"num_steps": 50, "guidance_scale": 5.0}
    comfyui: Mapping[str, str] = {
        "blocks.#.(self|cross)_attn.(q|k|v)": "blocks.#.attn(1|2).to_(q|k|v)",
        "blocks.#.(self|cross)_attn.o": "blocks.#.attn(1|2).to_out.0",
        "blocks.#.ffn.(0|2)": "blocks.#.ffn.net.(0.proj|2)",
    }

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        patch_temporal, patch_spatial, *_ = published["patch_size"]
        return super().read_sizes(published) | {"patch_temporal": patch_temporal, "patch_spatial": patch_spatial}

    def write_sizes(self, model: WanConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {
            "patch_size": [model.patch_temporal, model.patch_spatial, model.patch_spatial],
            "ffn_dim": model.ffn_size,
        }

    def forms(self, model: WanConfig) -> Mapping[str, Form]:
        sizes = {"n": model.num_attention_heads, "two": 2}
        return {
            **super().forms(model),
            "embed.linear.weight": patches("d c pt ph pw -> d (ph pw pt c)", model),
            "layers.#.attention.(q|k)_layernorm": Axes("(n half two) -> (n two half)", sizes),
            "layers.#.cross_attention.(q|k)_layernorm": SAME,
            "(layers.#.modulation|head).table": Axes("one k d -> (one k) d", {"one": 1}),
            "head.linear": patches("(pt ph pw c) ... -> (ph pw pt c) ...", model),
        }
