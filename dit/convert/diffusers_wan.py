"""Convert diffusers' `WanTransformer3DModel` (Wan 2.1 text to video) to and from our Wan.

Differences of diffusers' model:

* q, k and v (in cross-attention k and v) are separate matrices; a convolution embeds patches;
* features that rotate together are adjacent, ours have a distance of half a head, so in self-attention the rows of q
  and k and the weights of their norms are permuted;
* a predicted patch is ordered by frame, then row; ours by row, then frame;
* tables have a leading axis of size one.

Times are steps up to 1000; our network gets a thousandth of them. A `time_scale` other than 1000 would need a scheduler
with other steps, so it is an error. A learned null token for a dropped text has no counterpart. Models that read an
image (`image_dim`, `added_kv_proj_dim`) are not supported.

Source: diffusers 0.38, `models/transformers/transformer_wan.py`, names and settings; Wan Team 2025, arXiv:2503.20314.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dit.convert.diffusers_format import DiffusersTransformer, LatentSize, TrainedModel, learned_nulls
from dit.convert.rules import Axes, ByHead, Rule, RuleBook, Shape, with_bias
from dit.errors import ConfigError
from dit.models.wan.config import WanConfig
from dit.objectives.flow_matching import FlowMatching

LATENT_SIZE = (21, 60, 104)  # 81 frames of 480 x 832; not in the settings


class DiffusersWan(DiffusersTransformer[WanConfig]):
    """`WanTransformer3DModel`."""

    class_name = "WanTransformer3DModel"
    config_class = WanConfig
    fixed = ("freq_dim", "cross_attn_norm", "qk_norm", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
    only: Mapping[str, Any] = {
        "num_classes": None,
        "fps_conditioning": False,
        "size_conditioning": False,
        "qk_layernorm": True,
        "position_embedding": "rope_3d",
        "rope_theta": 10000.0,
        "rope_factors": None,
        "time_scale": 1000.0,
    }
    same: Mapping[str, str] = {
        "in_channels": "in_channels",
        "num_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "context_size": "text_dim",
        "layernorm_epsilon": "eps",
    }
    comfyui = (
        (r"blocks\.(\d+)\.attn1\.to_([qkv])", r"blocks.\1.self_attn.\2"),
        (r"blocks\.(\d+)\.attn1\.to_out\.0", r"blocks.\1.self_attn.o"),
        (r"blocks\.(\d+)\.attn2\.to_([qkv])", r"blocks.\1.cross_attn.\2"),
        (r"blocks\.(\d+)\.attn2\.to_out\.0", r"blocks.\1.cross_attn.o"),
        (r"blocks\.(\d+)\.ffn\.net\.0\.proj", r"blocks.\1.ffn.0"),
        (r"blocks\.(\d+)\.ffn\.net\.2", r"blocks.\1.ffn.2"),
    )

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        patch_temporal, *patch = published["patch_size"]
        if len(patch) != 2 or patch[0] != patch[1]:
            raise ConfigError(f"patch_size={list(published['patch_size'])}: our patches are (t, p, p), as high as wide")
        if published["in_channels"] > (published["out_channels"] or published["in_channels"]):
            raise ConfigError(
                f"in_channels={published['in_channels']} is above out_channels={published['out_channels']}: this "
                "network also reads a picture or a control clip, which WanConfig does not; use the text-to-video one"
            )
        model = WanConfig(
            **self.read_sizes(published),
            patch_temporal=patch_temporal,
            patch_spatial=patch[0],
            ffn_hidden_size=published["ffn_dim"],
            null_text="empty",
        )
        notes = [f"config.json has no latent size; {' x '.join(map(str, LATENT_SIZE))} is assumed"]
        sampling = {"solver": "euler", "num_steps": 50, "guidance_scale": 5.0}
        return TrainedModel(model, FlowMatching(time_shift=3.0), LATENT_SIZE, sampling, notes=notes)

    def write(self, model: WanConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        self.check_only(model, num_query_groups=model.num_query_groups and model.num_attention_heads)
        settings = self.write_sizes(model) | {
            "patch_size": [model.patch_temporal, model.patch_spatial, model.patch_spatial],
            "ffn_dim": model.ffn_size,
        }
        return settings, []

    def rules(self, model: WanConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        patch = {"pt": model.patch_temporal, "ph": model.patch_spatial, "pw": model.patch_spatial}
        row_by_row = Axes("(pt ph pw c) ... -> (ph pw pt c) ...", patch)
        table = Axes("one k d -> (one k) d", {"one": 1})
        embedder = "condition_embedder"
        rules = [
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
            layer, block = f"layers.{i}", f"blocks.{i}"
            rules += with_bias(
                f"{layer}.attention.linear_qkv", *(f"{block}.attn1.to_{part}" for part in "qkv"), form=qkv
            )
            rules += with_bias(f"{layer}.cross_attention.linear_q", f"{block}.attn2.to_q")
            rules += with_bias(
                f"{layer}.cross_attention.linear_kv", *(f"{block}.attn2.to_{part}" for part in "kv"), form=kv
            )
            for kind, attn in (("attention", "attn1"), ("cross_attention", "attn2")):
                rules += with_bias(f"{layer}.{kind}.linear_proj", f"{block}.{attn}.to_out.0")
                for part in "qk":
                    rule = Rule(f"{layer}.{kind}.{part}_layernorm.weight", (f"{block}.{attn}.norm_{part}.weight",))
                    rules.append(replace(rule, form=turned) if kind == "attention" else rule)
            rules += with_bias(f"{layer}.cross_norm", f"{block}.norm2")
            rules += with_bias(f"{layer}.mlp.linear_fc1", f"{block}.ffn.net.0.proj")
            rules += with_bias(f"{layer}.mlp.linear_fc2", f"{block}.ffn.net.2")
            rules.append(Rule(f"{layer}.modulation.table", (f"{block}.scale_shift_table",), table))
        return RuleBook(shapes, rules, unmatched=learned_nulls(shapes))
