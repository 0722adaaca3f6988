"""Convert diffusers' `PRXTransformer2DModel` to and from our PRX.

Differences of diffusers' model:

* q, k and v are ordered by part in one matrix, and features that rotate together are adjacent;
* gates and values of the MLP are two matrices;
* patches have channels slowest.

A learned null token for a dropped text has no counterpart.

Source: diffusers 0.38, `models/transformers/transformer_prx.py` and `pipelines/prx`, names and settings.
"""

from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import (
    DiffusersFormat,
    LatentSize,
    TrainedModel,
    learned_nulls,
    mlp_ratio,
    square_side,
)
from dit.convert.rules import TURNED_HEAD, Axes, ByHead, Rule, RuleBook, Shape, with_bias
from dit.errors import ConfigError
from dit.models.prx.config import PRXConfig
from dit.objectives.flow_matching import FlowMatching

TIME_SHIFT = 3.0  # of the published scheduler
LATENT_SIZE = (1, 64, 64)  # 512 px; not in the settings


class DiffusersPRX(DiffusersFormat[PRXConfig]):
    """`PRXTransformer2DModel`."""

    class_name = "PRXTransformer2DModel"
    config_class = PRXConfig
    fixed = ("time_max_period",)
    only: Mapping[str, Any] = {"patch_temporal": 1, "layernorm_epsilon": 1e-6, "position_embedding": "rope_3d"}
    same: Mapping[str, str] = {
        "in_channels": "in_channels",
        "patch_spatial": "patch_size",
        "context_size": "context_in_dim",
        "hidden_size": "hidden_size",
        "num_layers": "depth",
        "num_attention_heads": "num_heads",
        "rope_theta": "theta",
        "time_scale": "time_factor",
    }

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        model = PRXConfig(
            **{ours: published[theirs] for ours, theirs in self.same.items()},
            ffn_hidden_size=int(published["mlp_ratio"] * published["hidden_size"]),
            rope_axes=[0, *(published["axes_dim"] or [32, 32])],
            null_text="empty",
        )
        sampling = {"solver": "euler", "num_steps": 28, "guidance_scale": 4.0}
        return TrainedModel(model, FlowMatching(time_shift=TIME_SHIFT), LATENT_SIZE, sampling)

    def write(self, model: PRXConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        self.check_only(model, **({} if model.out_channels is None else {"out_channels": model.in_channels}))
        time, *axes = model.rope_axes
        if time or set(model.rope_factors or [1.0]) != {1.0}:
            raise ConfigError(
                f"{self.class_name} does not support this model: rope_axes={model.rope_axes} (the first only 0), "
                f"rope_factors={model.rope_factors} (only 1); only a model trained that way can be exported"
            )
        square_side(self.class_name, latent_size, model.patch_spatial)  # no effect on the network
        ratio = mlp_ratio(model.ffn_size, model.hidden_size)
        same = {theirs: getattr(model, ours) for ours, theirs in self.same.items()}
        return {**same, "mlp_ratio": ratio, "axes_dim": axes}, []

    def rules(self, model: PRXConfig, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        patch = {"ph": model.patch_spatial, "pw": model.patch_spatial}
        heads, features = model.num_attention_heads, model.head_size
        qkv = ByHead(heads, (features,) * 3, turned=(0, 1), fused=True)
        kv = ByHead(heads, (features,) * 2, turned=(0,), fused=True)
        gated = ByHead(1, (model.ffn_size,) * 2, alternate=True)
        rules = [
            Rule("embed.linear.weight", ("img_in.weight",), Axes("d (c ph pw) -> d (ph pw c)", patch)),
            Rule("embed.linear.bias", ("img_in.bias",)),
            *with_bias("embed_text", "txt_in"),
            *with_bias("conditioner.time.linear_1", "time_in.in_layer"),
            *with_bias("conditioner.time.linear_2", "time_in.out_layer"),
            *with_bias("head.modulation", "final_layer.adaLN_modulation.1"),
            *with_bias("head.linear", "final_layer.linear", form=Axes("(c ph pw) ... -> (ph pw c) ...", patch)),
        ]
        for i in range(model.num_layers):
            layer, block = f"layers.{i}", f"blocks.{i}"
            ours, theirs = f"{layer}.attention", f"{block}.attention"
            rules += [
                *with_bias(f"{layer}.modulation.linear", f"{block}.modulation.lin"),
                Rule(f"{ours}.linear_qkv.weight", (f"{theirs}.img_qkv_proj.weight",), qkv),
                Rule(f"{ours}.linear_kv.weight", (f"{theirs}.txt_kv_proj.weight",), kv),
                Rule(f"{ours}.linear_proj.weight", (f"{theirs}.to_out.0.weight",)),
                Rule(f"{ours}.q_layernorm.weight", (f"{theirs}.norm_q.weight",), TURNED_HEAD),
                Rule(f"{ours}.k_layernorm.weight", (f"{theirs}.norm_k.weight",), TURNED_HEAD),
                Rule(f"{ours}.text_k_layernorm.weight", (f"{theirs}.norm_added_k.weight",), TURNED_HEAD),
                Rule(f"{layer}.mlp.linear_fc1.weight", (f"{block}.gate_proj.weight", f"{block}.up_proj.weight"), gated),
                Rule(f"{layer}.mlp.linear_fc2.weight", (f"{block}.down_proj.weight",)),
            ]
        return RuleBook(shapes, rules, unmatched=learned_nulls(shapes))
