"""Convert diffusers' `SanaTransformer2DModel` (SANA and SANA 1.5) to and from our SANA.

Differences of diffusers' model: q, k and v (in cross-attention k and v) are separate matrices; linear layers of the
feed-forward are convolutions of 1 x 1, and its channels are ordered values, then gates. Times are steps up to 1000; our
network gets a thousandth of them. A learned null token for a dropped text has no counterpart. Models with positions
(4096 px) or a guidance input (SANA-Sprint) are not supported.

Source: diffusers 0.38, `models/transformers/sana_transformer.py`, names and settings; Xie et al. 2024,
arXiv:2410.10629.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from dit.convert.diffusers_format import (
    DiffusersTransformer,
    LatentSize,
    TrainedModel,
    learned_nulls,
    mlp_ratio,
    square_side,
)
from dit.convert.rules import Axes, ByHead, Pointwise, Rule, RuleBook, Shape, require, with_bias
from dit.models.sana.config import SanaConfig
from dit.objectives.flow_matching import FlowMatching

FULL_WIDTH = "rms_norm_across_heads"


@dataclass(frozen=True)
class GatesSecond:
    """External values, then gates; gates and values alternate in the parameter (see `GatedConvolution`).

    Attributes:
        pointwise: whether the external weight is a convolution of 1 x 1.
    """

    axis: ClassVar[Optional[int]] = 0
    pointwise: bool = False

    def from_external(self, tensors: Sequence[Tensor]) -> Tensor:
        values, gates = tensors[0].chunk(2)
        pairs = torch.stack([gates, values], 1).flatten(0, 1)
        return pairs.flatten(1) if self.pointwise and pairs.dim() > 1 else pairs

    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        gates, values = parameter.unflatten(0, (-1, 2)).unbind(1)
        external = torch.cat([values, gates])
        return (external[..., None, None] if self.pointwise and parameter.dim() > 1 else external,)


class DiffusersSana(DiffusersTransformer[SanaConfig]):
    """`SanaTransformer2DModel`."""

    class_name = "SanaTransformer2DModel"
    config_class = SanaConfig
    fixed = (
        *("dropout", "attention_bias", "norm_elementwise_affine", "norm_eps", "interpolation_scale"),
        *("guidance_embeds", "timestep_scale"),
    )
    only: Mapping[str, Any] = {
        "patch_temporal": 1,
        "num_classes": None,
        "fps_conditioning": False,
        "size_conditioning": False,
        "position_embedding": "none",
        "time_scale": 1000.0,
        "layernorm_epsilon": 1e-6,
    }
    same: Mapping[str, str] = {
        "in_channels": "in_channels",
        "num_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "num_cross_attention_heads": "num_cross_attention_heads",
        "patch_spatial": "patch_size",
        "context_size": "caption_channels",
    }

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        width = published["num_attention_heads"] * published["attention_head_dim"]
        heads, size = published["num_cross_attention_heads"], published["cross_attention_head_dim"]
        values = {
            "cross_attention_dim": published["cross_attention_dim"],
            "num_cross_attention_heads x cross_attention_head_dim": heads * size,
            "qk_norm": published["qk_norm"],
        }
        supported = {**dict.fromkeys(values, width), "qk_norm": FULL_WIDTH if published["qk_norm"] else None}
        require(f"{self.class_name} differs from our model", values, supported, "such weights cannot be imported")
        model = SanaConfig(
            **self.read_sizes(published),
            ffn_hidden_size=int(published["mlp_ratio"] * width),
            qk_layernorm=published["qk_norm"] is not None,
            null_text="empty",
        )
        side = published["sample_size"]
        sampling = {"solver": "euler", "num_steps": 20, "guidance_scale": 4.5}
        return TrainedModel(model, FlowMatching(time_shift=3.0), (1, side, side), sampling)

    def write(self, model: SanaConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        self.check_only(model)
        # Without positions, `sample_size` is only the default size of the pipeline.
        side, _ = square_side(self.class_name, latent_size, model.patch_spatial)
        settings = self.write_sizes(model) | {
            "cross_attention_head_dim": model.hidden_size // model.num_cross_attention_heads,
            "cross_attention_dim": model.hidden_size,
            "mlp_ratio": mlp_ratio(model.ffn_size, model.hidden_size),
            "sample_size": side,
            "qk_norm": FULL_WIDTH if model.qk_layernorm else None,
        }
        return settings, []

    def rules(self, model: SanaConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        patch = {"ph": model.patch_spatial, "pw": model.patch_spatial}
        time = "time_embed.emb.timestep_embedder"
        rules = [
            Rule("embed.linear.weight", ("patch_embed.proj.weight",), Axes("d c ph pw -> d (ph pw c)", patch)),
            Rule("embed.linear.bias", ("patch_embed.proj.bias",)),
            *with_bias("conditioner.time.linear_1", f"{time}.linear_1"),
            *with_bias("conditioner.time.linear_2", f"{time}.linear_2"),
            *with_bias("modulation.linear", "time_embed.linear"),
            *with_bias("text_projection.linear_1", "caption_projection.linear_1"),
            *with_bias("text_projection.linear_2", "caption_projection.linear_2"),
            Rule("text_projection.norm.weight", ("caption_norm.weight",)),
            Rule("head.table", ("scale_shift_table",)),
            *with_bias("head.linear", "proj_out"),
        ]
        three = ByHead(model.num_attention_heads, (model.head_size,) * 3)
        cross_heads = model.num_cross_attention_heads
        two = ByHead(cross_heads, (model.hidden_size // cross_heads,) * 2)
        for i in range(model.num_layers):
            layer, block = f"layers.{i}", f"transformer_blocks.{i}"
            qkv = [f"{block}.attn1.to_{part}.weight" for part in "qkv"]
            rules.append(Rule(f"{layer}.attention.linear_qkv.weight", tuple(qkv), three))
            rules += with_bias(f"{layer}.cross_attention.linear_q", f"{block}.attn2.to_q")
            kv = [f"{block}.attn2.to_{part}" for part in "kv"]
            rules += with_bias(f"{layer}.cross_attention.linear_kv", *kv, form=two)
            for kind, attn in (("attention", "attn1"), ("cross_attention", "attn2")):
                rules += with_bias(f"{layer}.{kind}.linear_proj", f"{block}.{attn}.to_out.0")
                rules += [
                    Rule(f"{layer}.{kind}.{part}_layernorm.weight", (f"{block}.{attn}.norm_{part}.weight",))
                    for part in ("qk" if model.qk_layernorm else "")
                ]
            rules += with_bias(f"{layer}.mlp.linear_fc1", f"{block}.ff.conv_inverted", form=GatesSecond(pointwise=True))
            rules.append(Rule(f"{layer}.mlp.weight", (f"{block}.ff.conv_depth.weight",), GatesSecond()))
            rules.append(Rule(f"{layer}.mlp.bias", (f"{block}.ff.conv_depth.bias",), GatesSecond()))
            rules.append(Rule(f"{layer}.mlp.linear_fc2.weight", (f"{block}.ff.conv_point.weight",), Pointwise()))
            rules.append(Rule(f"{layer}.modulation.table", (f"{block}.scale_shift_table",)))
        return RuleBook(shapes, rules, unmatched=learned_nulls(shapes))
