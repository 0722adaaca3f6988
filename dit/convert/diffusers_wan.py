"""Convert diffusers' `WanTransformer3DModel` (Wan 2.1 text to video) to and from our Wan.

Features that rotate together are adjacent in diffusers; ours have a distance of half a head. A predicted patch is
ordered by frame, then row; ours by row, then frame. Times are steps up to 1000, so `time_scale` must be 1000. Models
that read an image (`image_dim`, `added_kv_proj_dim`) are not supported.

Source: diffusers 0.38, `models/transformers/transformer_wan.py`, names and settings; Wan Team 2025, arXiv:2503.20314.
"""

from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import CROSS_ATTENTION, DiffusersFormat, LatentSize, patches
from dit.convert.rules import Axes, ByHead, Form
from dit.errors import ConfigError
from dit.models.wan.config import WanConfig


class DiffusersWan(DiffusersFormat[WanConfig]):
    """`WanTransformer3DModel`."""

    class_name = "WanTransformer3DModel"
    config_class = WanConfig
    fixed = ("freq_dim", "cross_attn_norm", "qk_norm", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
    same: Mapping[str, str] = {
        "in_channels": "in_channels",
        "num_layers": "num_layers",
        "context_size": "text_dim",
        "ffn_hidden_size": "ffn_dim",
        "layernorm_epsilon": "eps",
    }
    free = ("patch_spatial", "patch_temporal")
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
        patch_temporal, *patch = published["patch_size"]
        if len(patch) != 2 or patch[0] != patch[1]:
            raise ConfigError(f"patch_size={list(published['patch_size'])}: our patches are (t, p, p), as high as wide")
        if published["in_channels"] > (published["out_channels"] or published["in_channels"]):
            raise ConfigError(
                f"in_channels={published['in_channels']} is above out_channels={published['out_channels']}: this "
                "network also reads a picture or a control clip, which WanConfig does not; use the text-to-video one"
            )
        return super().read_sizes(published) | {"patch_temporal": patch_temporal, "patch_spatial": patch[0]}

    def write_sizes(self, model: WanConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {
            "patch_size": [model.patch_temporal, model.patch_spatial, model.patch_spatial],
            "ffn_dim": model.ffn_size,
        }

    def forms(self, model: WanConfig) -> Mapping[str, Form]:
        heads, size = model.num_attention_heads, model.head_size
        return {
            "embed.linear.weight": patches("d c pt ph pw -> d (ph pw pt c)", model),
            "layers.#.attention.linear_qkv": ByHead(heads, (size,) * 3, turned=(0, 1)),
            "layers.#.attention.(q|k)_layernorm": Axes("(n half two) -> (n two half)", {"n": heads, "two": 2}),
            "layers.#.cross_attention.linear_kv": ByHead(heads, (size,) * 2),
            "(layers.#.modulation|head).table": Axes("one k d -> (one k) d", {"one": 1}),
            "head.linear": patches("(pt ph pw c) ... -> (ph pw pt c) ...", model),
        }
