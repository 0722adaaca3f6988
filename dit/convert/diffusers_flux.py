"""Convert diffusers' `FluxTransformer2DModel` (FLUX.1) to and from our FLUX.

Differences of diffusers' model:

* q, k and v are separate matrices, in single-stream blocks also that of the MLP; their output projection has all inputs
  of attention first, then all of the MLP, while ours are ordered by head;
* features that rotate together are adjacent, ours have a distance of half a head, so the rows of q and k and the
  weights of their norms are permuted;
* the last modulation is ordered scale, then shift;
* the pipeline cuts patches of 2 x 2, channels slowest, so `in_channels` is that of a token;
* the guidance scale of a distilled network is an argument, and a setting (`guidance`) here. Times and guidance are the
  same; both code bases multiply by 1000.

Our learned null token and null vector for a dropped text have no counterpart.

Source: diffusers 0.38, `models/transformers/transformer_flux.py`, names and settings; black-forest-labs/flux.
"""

from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import DiffusersFormat, LatentSize, TrainedModel, learned_nulls
from dit.convert.rules import (
    TRAIN_THAT_WAY,
    TURNED_HEAD,
    Axes,
    ByHead,
    Chunks,
    Rule,
    RuleBook,
    Shape,
    require,
    with_bias,
)
from dit.errors import ConfigError
from dit.models.flux.config import FluxConfig
from dit.objectives.flow_matching import FlowMatching

PATCH = 2  # fixed in the pipeline
DEV_GUIDANCE = 3.5
LATENT_SIZE = (1, 128, 128)  # 1024 px; not in the settings
ONLY_THESE = {
    "patch_spatial": PATCH,
    "patch_temporal": 1,
    "layernorm_epsilon": 1e-6,
    "position_embedding": "rope_3d",
    "rope_theta": 10000.0,
    "rope_factors": None,
    "time_scale": 1000.0,
}
"""Our settings, with the only values that diffusers' model supports."""


class DiffusersFlux(DiffusersFormat[FluxConfig]):
    """`FluxTransformer2DModel`."""

    class_name = "FluxTransformer2DModel"
    config_class = FluxConfig
    defaults: Mapping[str, Any] = {
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": None,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
    }
    fixed: Mapping[str, Any] = {"patch_size": 1}
    comfyui = (
        (r"transformer_blocks\.(\d+)\.attn\.to_[qkv]", r"double_blocks.\1.img_attn.qkv"),
        (r"transformer_blocks\.(\d+)\.attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj", r"double_blocks.\1.img_mlp.0"),
        (r"transformer_blocks\.(\d+)\.ff\.net\.2", r"double_blocks.\1.img_mlp.2"),
        (r"transformer_blocks\.(\d+)\.norm1\.linear", r"double_blocks.\1.img_mod.lin"),
        (r"transformer_blocks\.(\d+)\.attn\.add_[qkv]_proj", r"double_blocks.\1.txt_attn.qkv"),
        (r"transformer_blocks\.(\d+)\.attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
        (r"transformer_blocks\.(\d+)\.ff_context\.net\.0\.proj", r"double_blocks.\1.txt_mlp.0"),
        (r"transformer_blocks\.(\d+)\.ff_context\.net\.2", r"double_blocks.\1.txt_mlp.2"),
        (r"transformer_blocks\.(\d+)\.norm1_context\.linear", r"double_blocks.\1.txt_mod.lin"),
        (r"single_transformer_blocks\.(\d+)\.(?:attn\.to_[qkv]|proj_mlp)", r"single_blocks.\1.linear1"),
        (r"single_transformer_blocks\.(\d+)\.proj_out", r"single_blocks.\1.linear2"),
        (r"single_transformer_blocks\.(\d+)\.norm\.linear", r"single_blocks.\1.modulation.lin"),
    )

    def lora_pipeline(self, model: FluxConfig) -> str:
        return "FluxPipeline"

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        channels, out_channels = published["in_channels"], published["out_channels"]
        width = published["num_attention_heads"] * published["attention_head_dim"]
        if channels % PATCH**2 or (out_channels or 0) % PATCH**2:
            raise ConfigError(
                f"in_channels={channels}, out_channels={out_channels}: tokens are patches of {PATCH} x {PATCH}, so "
                f"both must be multiples of {PATCH**2}"
            )
        model = FluxConfig(
            in_channels=channels // PATCH**2,
            out_channels=None if out_channels in (None, channels) else out_channels // PATCH**2,
            context_size=published["joint_attention_dim"],
            pooled_size=published["pooled_projection_dim"],
            hidden_size=width,
            num_attention_heads=published["num_attention_heads"],
            num_joint_layers=published["num_layers"],
            num_single_layers=published["num_single_layers"],
            ffn_hidden_size=4 * width,
            rope_axes=list(published["axes_dims_rope"]),
            guidance=DEV_GUIDANCE if published["guidance_embeds"] else None,
        )
        notes = [f"config.json has no latent size; {LATENT_SIZE[1]} x {LATENT_SIZE[2]} is assumed"]
        if published["guidance_embeds"]:
            notes.append(f"the network gets a guidance scale of {DEV_GUIDANCE:g} (model.guidance)")
        sampling = {"solver": "euler", "num_steps": 28, "guidance_scale": 1.0}
        return TrainedModel(model, FlowMatching(time_shift=3.0), LATENT_SIZE, sampling, notes=notes)

    def write(self, model: FluxConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        values = {name: getattr(model, name) for name in ONLY_THESE} | {"ffn_hidden_size": model.ffn_size}
        supported = {**ONLY_THESE, "ffn_hidden_size": 4 * model.hidden_size}
        require(f"{self.class_name} does not support this model", values, supported, TRAIN_THAT_WAY)
        settings = {
            "in_channels": model.token_channels,
            "out_channels": None if model.output_features == model.token_channels else model.output_features,
            "num_layers": model.num_joint_layers,
            "num_single_layers": model.num_single_layers,
            "attention_head_dim": model.head_size,
            "num_attention_heads": model.num_attention_heads,
            "joint_attention_dim": model.context_size,
            "pooled_projection_dim": model.pooled_size,
            "guidance_embeds": model.guidance is not None,
            "axes_dims_rope": list(model.rope_axes),
        }
        return settings, []

    def rules(self, model: FluxConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        patch = {"ph": PATCH, "pw": PATCH}
        channels_last = Axes("(c ph pw) ... -> (ph pw c) ...", patch)
        rules = [
            Rule("embed.linear.weight", ("x_embedder.weight",), Axes("d (c ph pw) -> d (ph pw c)", patch)),
            Rule("embed.linear.bias", ("x_embedder.bias",)),
            *with_bias("embed_text", "context_embedder"),
            *with_bias("head.modulation", "norm_out.linear", form=Chunks((1, 0))),
            *with_bias("head.linear", "proj_out", form=channels_last),
        ]
        embedders = {"time": "timestep_embedder", "pooled": "text_embedder"}
        if model.guidance is not None:
            embedders["guidance"] = "guidance_embedder"
        for embedder, module in embedders.items():
            for linear in ("linear_1", "linear_2"):
                rules += with_bias(f"conditioner.{embedder}.{linear}", f"time_text_embed.{module}.{linear}")
        for i in range(model.num_joint_layers):
            rules += _joint(model, f"layers.{i}", f"transformer_blocks.{i}")
        for i in range(model.num_single_layers):
            rules += _single(model, f"layers.{model.num_joint_layers + i}", f"single_transformer_blocks.{i}")
        return RuleBook(shapes, rules, unmatched=learned_nulls(shapes))


def _joint(model: FluxConfig, layer: str, block: str) -> list[Rule]:
    qkv = ByHead(model.num_attention_heads, (model.head_size,) * 3, turned=(0, 1))
    attention = f"{block}.attn"
    streams = {
        "image": (["to_q", "to_k", "to_v"], "to_out.0", "norm_q", "norm_k", ""),
        "text": (["add_q_proj", "add_k_proj", "add_v_proj"], "to_add_out", "norm_added_q", "norm_added_k", "_context"),
    }
    rules = []
    for stream, (parts, out, q_norm, k_norm, suffix) in streams.items():
        module = f"{layer}.{stream}"
        rules += with_bias(f"{module}.modulation.linear", f"{block}.norm1{suffix}.linear")
        rules += with_bias(f"{module}.linear_qkv", *(f"{attention}.{part}" for part in parts), form=qkv)
        rules += with_bias(f"{module}.linear_proj", f"{attention}.{out}")
        rules.append(Rule(f"{module}.q_layernorm.weight", (f"{attention}.{q_norm}.weight",), TURNED_HEAD))
        rules.append(Rule(f"{module}.k_layernorm.weight", (f"{attention}.{k_norm}.weight",), TURNED_HEAD))
        rules += with_bias(f"{module}.mlp.linear_fc1", f"{block}.ff{suffix}.net.0.proj")
        rules += with_bias(f"{module}.mlp.linear_fc2", f"{block}.ff{suffix}.net.2")
    return rules


def _single(model: FluxConfig, layer: str, block: str) -> list[Rule]:
    heads, size, share = model.num_attention_heads, model.head_size, model.ffn_size // model.num_attention_heads
    inward = ByHead(heads, (size, size, size, share), turned=(0, 1))
    outward = ByHead(heads, (size, share), fused=True, dim=1)
    parts = [f"{block}.attn.to_q", f"{block}.attn.to_k", f"{block}.attn.to_v", f"{block}.proj_mlp"]
    return [
        *with_bias(f"{layer}.modulation.linear", f"{block}.norm.linear"),
        *with_bias(f"{layer}.linear_in", *parts, form=inward),
        Rule(f"{layer}.linear_out.weight", (f"{block}.proj_out.weight",), outward),
        Rule(f"{layer}.linear_out.bias", (f"{block}.proj_out.bias",)),
        Rule(f"{layer}.q_layernorm.weight", (f"{block}.attn.norm_q.weight",), TURNED_HEAD),
        Rule(f"{layer}.k_layernorm.weight", (f"{block}.attn.norm_k.weight",), TURNED_HEAD),
    ]
