"""Convert diffusers' `PixArtTransformer2DModel` (PixArt-alpha and Sigma) to and from our ST-DiT with full attention.

Differences of diffusers' model: q, k and v (in cross-attention k and v) are separate matrices; a convolution embeds
patches; positions span `sample_size / patch_size / interpolation_scale` indices at every resolution, our
`position_span`. Times are steps 0 to 999; our network gets a thousandth of them. A `time_scale` other than 1000 would
need a scheduler with other steps, so it is an error. PixArt replaces a dropped text by the embedding of the empty text
(`null_text=empty`); a learned null token has no counterpart.

The 1024 px model of PixArt-alpha is not supported, because it is conditioned on resolution and aspect ratio.

Source: diffusers 0.38, `models/transformers/pixart_transformer_2d.py`, names and settings; Chen et al. 2023,
arXiv:2310.00426.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dit.convert.class_dit import trained_objective
from dit.convert.diffusers_format import DiffusersTransformer, LatentSize, TrainedModel, learned_nulls, square_side
from dit.convert.rules import Axes, ByHead, Rule, RuleBook, Shape, require, with_bias
from dit.errors import ConfigError
from dit.layers.positions import sincos
from dit.models.stdit.config import STDiTConfig
from dit.patchify import grid_positions


class DiffusersPixArt(DiffusersTransformer[STDiTConfig]):
    """`PixArtTransformer2DModel`."""

    class_name = "PixArtTransformer2DModel"
    aliases = ("Transformer2DModel",)
    config_class = STDiTConfig
    fixed = ("attention_bias", "activation_fn", "norm_type", "norm_elementwise_affine", "norm_eps", "attention_type")
    only: Mapping[str, Any] = {
        "layer_pattern": ["full"],
        "position_embedding": "sincos_2d",
        "patch_temporal": 1,
        "num_classes": None,
        "fps_conditioning": False,
        "size_conditioning": False,
        "qk_layernorm": False,
        "add_bias": True,
        "layernorm_epsilon": 1e-6,
        "time_scale": 1000.0,
    }
    same: Mapping[str, str] = {
        "in_channels": "in_channels",
        "num_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "patch_spatial": "patch_size",
        "context_size": "caption_channels",
    }
    comfyui = (
        (r"transformer_blocks\.(\d+)\.attn1\.to_[qkv]", r"blocks.\1.attn.qkv"),
        (r"transformer_blocks\.(\d+)\.attn1\.to_out\.0", r"blocks.\1.attn.proj"),
        (r"transformer_blocks\.(\d+)\.attn2\.to_q", r"blocks.\1.cross_attn.q_linear"),
        (r"transformer_blocks\.(\d+)\.attn2\.to_[kv]", r"blocks.\1.cross_attn.kv_linear"),
        (r"transformer_blocks\.(\d+)\.attn2\.to_out\.0", r"blocks.\1.cross_attn.proj"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj", r"blocks.\1.mlp.fc1"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.2", r"blocks.\1.mlp.fc2"),
    )

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        size, width = published["sample_size"], published["num_attention_heads"] * published["attention_head_dim"]
        extra = published["use_additional_conditions"]
        values = {
            "use_additional_conditions": size == 128 if extra is None else extra,
            "cross_attention_dim": published["cross_attention_dim"],
        }
        supported = {"use_additional_conditions": False, "cross_attention_dim": width}
        require(f"{self.class_name} differs from our model", values, supported, "such weights cannot be imported")
        if published["caption_channels"] is None:
            raise ConfigError(f"{self.class_name} with caption_channels=None has no text projection; ours has one")
        # The default is an integer number of base resolutions.
        scale = published["interpolation_scale"]
        scale = max(size // 64, 1) if scale is None else scale
        model = STDiTConfig(
            **self.read_sizes(published),
            layer_pattern=["full"],
            qk_layernorm=False,
            fps_conditioning=False,
            position_span=size // published["patch_size"] / scale,
            null_text="empty",
        )
        sampling = {"solver": "dpmpp_2m", "num_steps": 20, "guidance_scale": 4.5}
        return TrainedModel(model, trained_objective(model), (1, size, size), sampling)

    def write(self, model: STDiTConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        groups = model.num_query_groups and model.num_attention_heads
        self.check_only(model, num_query_groups=groups, ffn_size=4 * model.hidden_size)
        height, notes = square_side(self.class_name, latent_size, model.patch_spatial)
        side = height // model.patch_spatial
        if model.position_span is None:
            notes.append(f"positions are not scaled here; diffusers scales those of other sizes than {side} patches")
        settings = self.write_sizes(model) | {
            "cross_attention_dim": model.hidden_size,
            "sample_size": height,
            "interpolation_scale": 1 if model.position_span is None else side / model.position_span,
            "use_additional_conditions": False,
        }
        return settings, notes

    def rules(self, model: STDiTConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        patch = {"ph": model.patch_spatial, "pw": model.patch_spatial}
        time = "adaln_single.emb.timestep_embedder"
        rules = [
            Rule("embed.linear.weight", ("pos_embed.proj.weight",), Axes("d c ph pw -> d (ph pw c)", patch)),
            Rule("embed.linear.bias", ("pos_embed.proj.bias",)),
            *with_bias("conditioner.time.linear_1", f"{time}.linear_1"),
            *with_bias("conditioner.time.linear_2", f"{time}.linear_2"),
            *with_bias("modulation.linear", "adaln_single.linear"),
            *with_bias("text_projection.linear_1", "caption_projection.linear_1"),
            *with_bias("text_projection.linear_2", "caption_projection.linear_2"),
            Rule("head.table", ("scale_shift_table",)),
            *with_bias("head.linear", "proj_out"),
        ]
        three, two = (ByHead(model.num_attention_heads, (model.head_size,) * parts) for parts in (3, 2))
        for i in range(model.num_layers):
            layer, block = f"layers.{i}", f"transformer_blocks.{i}"
            qkv = [f"{block}.attn1.to_{part}" for part in "qkv"]
            rules += with_bias(f"{layer}.attentions.full.linear_qkv", *qkv, form=three)
            rules += with_bias(f"{layer}.attentions.full.linear_proj", f"{block}.attn1.to_out.0")
            rules += with_bias(f"{layer}.cross_attention.linear_q", f"{block}.attn2.to_q")
            rules += with_bias(
                f"{layer}.cross_attention.linear_kv", f"{block}.attn2.to_k", f"{block}.attn2.to_v", form=two
            )
            rules += with_bias(f"{layer}.cross_attention.linear_proj", f"{block}.attn2.to_out.0")
            rules += with_bias(f"{layer}.mlp.linear_fc1", f"{block}.ff.net.0.proj")
            rules += with_bias(f"{layer}.mlp.linear_fc2", f"{block}.ff.net.2")
            rules.append(Rule(f"{layer}.modulation.table", (f"{block}.scale_shift_table",)))
        tables = {"pos_embed.pos_embed": _positions(model, latent_size)}
        return RuleBook(shapes, rules, unmatched=learned_nulls(shapes), tables=tables)


def _positions(model: STDiTConfig, latent_size: LatentSize) -> Tensor:
    """Return the fixed positions that old files store, `[1, patches, D]`."""
    side = square_side(DiffusersPixArt.class_name, latent_size, model.patch_spatial)[0] // model.patch_spatial
    scale = 1.0 if model.position_span is None else model.position_span / side
    return sincos(grid_positions((1, side, side)) * scale, model.hidden_size, "sincos_2d")[None]
