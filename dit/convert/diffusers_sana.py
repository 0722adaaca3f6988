"""Convert diffusers' `SanaTransformer2DModel` (SANA and SANA 1.5) to and from our SANA.

Linear layers of the feed-forward are convolutions of 1 x 1, and its channels are ordered values, then gates. Times are
steps up to 1000, so `time_scale` must be 1000. Models with positions (4096 px) or a guidance input (SANA-Sprint) are
not supported.

Source: diffusers 0.38, `models/transformers/sana_transformer.py`, names and settings; Xie et al. 2024,
arXiv:2410.10629.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dit.convert.diffusers_format import CROSS_ATTENTION, DiffusersFormat, LatentSize, patches
from dit.convert.rules import ByHead, Form, Pointwise
from dit.models.sana.config import SanaConfig

FULL_WIDTH = "rms_norm_across_heads"


@dataclass(frozen=True)
class GatesSecond(Form):
    """External values, then gates; gates and values alternate in the parameter (see `GatedConvolution`).

    Attributes:
        pointwise: whether the external weight is a convolution of 1 x 1.
    """

    pointwise: bool = False

    def from_external(self, tensors: Sequence[Tensor]) -> Tensor:
        values, gates = tensors[0].chunk(2)
        pairs = torch.stack([gates, values], 1).flatten(0, 1)
        return pairs.flatten(1) if self.pointwise and pairs.dim() > 1 else pairs

    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        gates, values = parameter.unflatten(0, (-1, 2)).unbind(1)
        external = torch.cat([values, gates])
        return (external[..., None, None] if self.pointwise and parameter.dim() > 1 else external,)


class DiffusersSana(DiffusersFormat[SanaConfig]):
    """`SanaTransformer2DModel`."""

    class_name = "SanaTransformer2DModel"
    config_class = SanaConfig
    fixed = (
        *("dropout", "attention_bias", "norm_elementwise_affine", "norm_eps", "interpolation_scale"),
        *("guidance_embeds", "timestep_scale"),
    )
    same: Mapping[str, str] = {
        "in_channels": "in_channels",
        "num_layers": "num_layers",
        "num_cross_attention_heads": "num_cross_attention_heads",
        "patch_spatial": "patch_size",
        "context_size": "caption_channels",
    }
    free = ("qk_layernorm",)
    names: Mapping[str, str] = {
        **CROSS_ATTENTION,
        "embed.linear": "patch_embed.proj",
        "conditioner.time.linear_(1|2)": "time_embed.emb.timestep_embedder.linear_(1|2)",
        "modulation.linear": "time_embed.linear",
        "text_projection.linear_(1|2)": "caption_projection.linear_(1|2)",
        "text_projection.norm": "caption_norm",
        "layers.#.(attention|cross_attention).(q|k)_layernorm": "transformer_blocks.#.attn(1|2).norm_(q|k)",
        "layers.#.mlp.linear_fc1": "transformer_blocks.#.ff.conv_inverted",
        "layers.#.mlp": "transformer_blocks.#.ff.conv_depth",
        "layers.#.mlp.linear_fc2": "transformer_blocks.#.ff.conv_point",
    }
    time_shift = 3.0
    sampling: Mapping[str, Any] = {"num_steps": 20, "guidance_scale": 4.5}

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        sizes, norm = super().read_sizes(published), published["qk_norm"]
        heads, size = published["num_cross_attention_heads"], published["cross_attention_head_dim"]
        product = "num_cross_attention_heads x cross_attention_head_dim"
        supported = dict.fromkeys(("cross_attention_dim", product), sizes["hidden_size"])
        self.check_published({**published, product: heads * size}, qk_norm=FULL_WIDTH if norm else None, **supported)
        return sizes | {"qk_layernorm": norm is not None}

    def write_sizes(self, model: SanaConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {
            "cross_attention_head_dim": model.hidden_size // model.num_cross_attention_heads,
            "cross_attention_dim": model.hidden_size,
            "qk_norm": FULL_WIDTH if model.qk_layernorm else None,
        }

    def forms(self, model: SanaConfig) -> Mapping[str, Form]:
        cross_heads = model.num_cross_attention_heads
        return {
            "embed.linear.weight": patches("d c ph pw -> d (ph pw c)", model),
            "layers.#.attention.linear_qkv": ByHead(model.num_attention_heads, (model.head_size,) * 3),
            "layers.#.cross_attention.linear_kv": ByHead(cross_heads, (model.hidden_size // cross_heads,) * 2),
            "layers.#.mlp.linear_fc1": GatesSecond(pointwise=True),
            "layers.#.mlp": GatesSecond(),
            "layers.#.mlp.linear_fc2": Pointwise(),
        }
