"""Convert diffusers' `PRXTransformer2DModel` to and from our PRX.

q, k and v are ordered by part in one matrix, features that rotate together are adjacent, and patches have channels
slowest.

Source: diffusers 0.38, `models/transformers/transformer_prx.py` and `pipelines/prx`, names and settings.
"""

from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import DiffusersFormat, LatentSize, patches, square_side
from dit.convert.rules import TURNED_HEAD, ByHead, Form
from dit.models.prx.config import PRXConfig


class DiffusersPRX(DiffusersFormat[PRXConfig]):
    """`PRXTransformer2DModel`."""

    class_name = "PRXTransformer2DModel"
    config_class = PRXConfig
    other = ("axes_dim",)
    same: Mapping[str, str] = {
        "patch_spatial": "patch_size",
        "num_layers": "depth",
        "num_attention_heads": "num_heads",
        "rope_theta": "theta",
        "time_scale": "time_factor",
    }
    names: Mapping[str, str] = {
        "embed.linear": "img_in",
        "embed_text": "txt_in",
        "conditioner.time.linear_(1|2)": "time_in.(in|out)_layer",
        "layers.#.modulation.linear": "blocks.#.modulation.lin",
        "layers.#.attention.linear_qkv": "blocks.#.attention.img_qkv_proj",
        "layers.#.attention.linear_kv": "blocks.#.attention.txt_kv_proj",
        "layers.#.attention.linear_proj": "blocks.#.attention.to_out.0",
        "layers.#.attention.(q|k|text_k)_layernorm": "blocks.#.attention.norm_(q|k|added_k)",
        "layers.#.mlp.linear_fc1": "blocks.#.(gate|up)_proj",
        "layers.#.mlp.linear_fc2": "blocks.#.down_proj",
        "head.modulation": "final_layer.adaLN_modulation.1",
        "head.linear": "final_layer.linear",
    }
    latent_size = (1, 64, 64)  # 512 px; not in the settings
    time_shift = 3.0  # of the published scheduler
    sampling: Mapping[str, Any] = {"num_steps": 28, "guidance_scale": 4.0}

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        return super().read_sizes(published) | {"rope_axes": [0, *(published["axes_dim"] or [32, 32])]}

    def write_sizes(self, model: PRXConfig, latent_size: LatentSize) -> dict[str, Any]:
        square_side(self.class_name, latent_size, model.patch_spatial)  # no effect on the network
        return super().write_sizes(model, latent_size) | {"axes_dim": model.rope_axes[1:]}

    def forms(self, model: PRXConfig) -> Mapping[str, Form]:
        shares = (model.head_size,) * 2
        return {
            **super().forms(model),
            "embed.linear.weight": patches("d (c ph pw) -> d (ph pw c)", model),
            "layers.#.attention.linear_kv": ByHead(model.num_attention_heads, shares, turned=(0,), fused=True),
            "layers.#.attention.text_k_layernorm": TURNED_HEAD,
            "layers.#.mlp.linear_fc1": ByHead(1, (model.ffn_size,) * 2, alternate=True),
            "head.linear": patches("(c ph pw) ... -> (ph pw c) ...", model),
        }
