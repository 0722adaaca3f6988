"""diffusers' `WanTransformer3DModel` (Wan 2.1 text to video), and our Wan.

All differences of their model:

* q, k and v (in cross-attention k and v) as separate matrices; a convolution that embeds patches;
* features that rotate together are adjacent, ours are half a head apart: in self-attention rows of q and k
  and the weights of their norms change places;
* a predicted patch goes frame by frame, ours row by row;
* tables with an axis of one more.

Times are steps up to 1000, and our network gets a thousandth of them; a `time_scale` other than 1000 would need a
scheduler of other steps and is refused. A learned null token for a dropped text has no counterpart. Models that read
an image (`image_dim`, `added_kv_proj_dim`) are refused.

Source: diffusers 0.38, `models/transformers/transformer_wan.py`, names and settings; Wan Team 2025, arXiv:2503.20314.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dit.convert.diffusers_format import DiffusersFormat, LatentSize, TrainedModel, learned_nulls
from dit.convert.rules import TRAIN_THAT_WAY, Axes, ByHead, Rule, RuleBook, Shape, require, with_bias
from dit.errors import ConfigError
from dit.models.wan.config import WanConfig
from dit.objectives.flow_matching import FlowMatching

LATENT_SIZE = (21, 60, 104)  # 81 frames of 480 x 832; the settings do not say
ONLY_THESE = {
    "num_classes": None,
    "fps_conditioning": False,
    "size_conditioning": False,
    "qk_layernorm": True,
    "position_embedding": "rope_3d",
    "rope_theta": 10000.0,
    "rope_factors": None,
    "time_scale": 1000.0,
}
"""Settings of ours that theirs has no others of."""


class DiffusersWan(DiffusersFormat[WanConfig]):
    """`WanTransformer3DModel`."""

    class_name = "WanTransformer3DModel"
    config_class = WanConfig
    defaults: Mapping[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    }
    fixed: Mapping[str, Any] = {
        "freq_dim": 256,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
    }
    comfyui = (
        (r"blocks\.(\d+)\.attn1\.to_([qkv])", r"blocks.\1.self_attn.\2"),
        (r"blocks\.(\d+)\.attn1\.to_out\.0", r"blocks.\1.self_attn.o"),
        (r"blocks\.(\d+)\.attn2\.to_([qkv])", r"blocks.\1.cross_attn.\2"),
        (r"blocks\.(\d+)\.attn2\.to_out\.0", r"blocks.\1.cross_attn.o"),
        (r"blocks\.(\d+)\.ffn\.net\.0\.proj", r"blocks.\1.ffn.0"),
        (r"blocks\.(\d+)\.ffn\.net\.2", r"blocks.\1.ffn.2"),
    )

    def lora_pipeline(self, model: WanConfig) -> str:
        return "WanPipeline"

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        patch_temporal, *patch = published["patch_size"]
        if len(patch) != 2 or patch[0] != patch[1]:
            raise ConfigError(
                f"patch_size={list(published['patch_size'])}: our patches are (t, p, p), equally high and wide"
            )
        channels, out_channels = published["in_channels"], published["out_channels"]
        model = WanConfig(
            in_channels=channels,
            out_channels=None if out_channels in (None, channels) else out_channels,
            patch_temporal=patch_temporal,
            patch_spatial=patch[0],
            context_size=published["text_dim"],
            hidden_size=published["num_attention_heads"] * published["attention_head_dim"],
            num_layers=published["num_layers"],
            num_attention_heads=published["num_attention_heads"],
            ffn_hidden_size=published["ffn_dim"],
            layernorm_epsilon=published["eps"],
        )
        notes = [f"config.json names no latent size; {' x '.join(map(str, LATENT_SIZE))} is taken"]
        sampling = {"solver": "euler", "num_steps": 50, "guidance_scale": 5.0}
        return TrainedModel(model, FlowMatching(time_shift=3.0), LATENT_SIZE, sampling, notes=notes)

    def write(self, model: WanConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        shown = {name: getattr(model, name) for name in ONLY_THESE}
        shown["num_query_groups"] = model.num_query_groups or model.num_attention_heads
        wanted = {**ONLY_THESE, "num_query_groups": model.num_attention_heads}
        require(f"{self.class_name} cannot hold this model", shown, wanted, TRAIN_THAT_WAY)
        settings = {
            "patch_size": [model.patch_temporal, model.patch_spatial, model.patch_spatial],
            "num_attention_heads": model.num_attention_heads,
            "attention_head_dim": model.head_size,
            "in_channels": model.in_channels,
            "out_channels": model.out_channels or model.in_channels,
            "text_dim": model.context_size,
            "ffn_dim": model.ffn_size,
            "num_layers": model.num_layers,
            "eps": model.layernorm_epsilon,
        }
        return settings, []

    def rules(self, model: WanConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        patch = {"pt": model.patch_temporal, "ph": model.patch_spatial, "pw": model.patch_spatial}
        row_by_row = Axes("(pt ph pw c) ... -> (ph pw pt c) ...", patch)
        table = Axes("one k d -> (one k) d", {"one": 1})
        embedder = "condition_embedder"
        found = [
            Rule("embed.linear.weight", ("patch_embedding.weight",), Axes("d c pt ph pw -> d (ph pw pt c)", patch)),
            Rule("embed.linear.bias", ("patch_embedding.bias",)),
            *with_bias("conditioner.time.linear_1", f"{embedder}.time_embedder.linear_1"),
            *with_bias("conditioner.time.linear_2", f"{embedder}.time_embedder.linear_2"),
            *with_bias("modulation.linear", f"{embedder}.time_proj"),
            *with_bias("text_projection.linear_1", f"{embedder}.text_embedder.linear_1"),
            *with_bias("text_projection.linear_2", f"{embedder}.text_embedder.linear_2"),
            Rule("head.table", ("scale_shift_table",), table),
            *with_bias("head.linear", "proj_out", form=row_by_row),
        ]
        heads, size = model.num_attention_heads, model.head_size
        qkv, kv = ByHead(heads, (size,) * 3, turned=(0, 1)), ByHead(heads, (size,) * 2)
        turned = Axes("(n half two) -> (n two half)", {"n": heads, "two": 2})
        for i in range(model.num_layers):
            ours, theirs = f"layers.{i}", f"blocks.{i}"
            found += with_bias(
                f"{ours}.attention.linear_qkv", *(f"{theirs}.attn1.to_{part}" for part in "qkv"), form=qkv
            )
            found += with_bias(f"{ours}.cross_attention.linear_q", f"{theirs}.attn2.to_q")
            found += with_bias(
                f"{ours}.cross_attention.linear_kv", *(f"{theirs}.attn2.to_{part}" for part in "kv"), form=kv
            )
            for own, other in (("attention", "attn1"), ("cross_attention", "attn2")):
                found += with_bias(f"{ours}.{own}.linear_proj", f"{theirs}.{other}.to_out.0")
                for part in "qk":
                    rule = Rule(f"{ours}.{own}.{part}_layernorm.weight", (f"{theirs}.{other}.norm_{part}.weight",))
                    found.append(replace(rule, form=turned) if own == "attention" else rule)
            found += with_bias(f"{ours}.cross_norm", f"{theirs}.norm2")
            found += with_bias(f"{ours}.mlp.linear_fc1", f"{theirs}.ffn.net.0.proj")
            found += with_bias(f"{ours}.mlp.linear_fc2", f"{theirs}.ffn.net.2")
            found.append(Rule(f"{ours}.modulation.table", (f"{theirs}.scale_shift_table",), table))
        return RuleBook(shapes, found, only_ours=learned_nulls(shapes))
