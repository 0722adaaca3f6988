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
from dit.convert.rules import (
    TRAIN_THAT_WAY,
    TURNED_HEAD,
    Axes,
    ByHead,
    Rule,
    RuleBook,
    Shape,
    require,
    with_bias,
)
from dit.models.prx.config import PRXConfig
from dit.objectives.flow_matching import FlowMatching

TIME_SHIFT = 3.0  # of the published scheduler
LATENT_SIZE = (1, 64, 64)  # 512 px; not in the settings


class DiffusersPRX(DiffusersFormat[PRXConfig]):
    """`PRXTransformer2DModel`."""

    class_name = "PRXTransformer2DModel"
    config_class = PRXConfig
    fixed: Mapping[str, Any] = {"time_max_period": 10000}
    defaults: Mapping[str, Any] = {
        **fixed,
        "in_channels": 16,
        "patch_size": 2,
        "context_in_dim": 2304,
        "hidden_size": 1792,
        "mlp_ratio": 3.5,
        "num_heads": 28,
        "depth": 16,
        "axes_dim": [32, 32],
        "theta": 10000,
        "time_factor": 1000.0,
    }

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        size = published["hidden_size"]
        model = PRXConfig(
            in_channels=published["in_channels"],
            patch_spatial=published["patch_size"],
            context_size=published["context_in_dim"],
            hidden_size=size,
            num_layers=published["depth"],
            num_attention_heads=published["num_heads"],
            ffn_hidden_size=int(published["mlp_ratio"] * size),
            rope_theta=float(published["theta"]),
            rope_axes=[0, *(published["axes_dim"] or [32, 32])],
            time_scale=published["time_factor"],
            null_text="empty",
        )
        sampling = {"solver": "euler", "num_steps": 28, "guidance_scale": 4.0}
        return TrainedModel(model, FlowMatching(time_shift=TIME_SHIFT), LATENT_SIZE, sampling)

    def write(self, model: PRXConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        values = {
            "patch_temporal": model.patch_temporal,
            "out_channels": model.out_channels or model.in_channels,
            "layernorm_epsilon": model.layernorm_epsilon,
            "rope_axes[0]": model.rope_axes[0],
            "rope_factors": list(model.rope_factors or [1.0] * 3),
        }
        supported = {
            "patch_temporal": 1,
            "out_channels": model.in_channels,
            "layernorm_epsilon": 1e-6,
            "rope_axes[0]": 0,
            "rope_factors": [1.0] * 3,
        }
        require(f"{self.class_name} does not support this model", values, supported, TRAIN_THAT_WAY)
        square_side(self.class_name, latent_size, model.patch_spatial)  # no effect on the network
        settings = {
            "in_channels": model.in_channels,
            "patch_size": model.patch_spatial,
            "context_in_dim": model.context_size,
            "hidden_size": model.hidden_size,
            "mlp_ratio": mlp_ratio(model.ffn_size, model.hidden_size),
            "num_heads": model.num_attention_heads,
            "depth": model.num_layers,
            "axes_dim": list(model.rope_axes[1:]),
            "theta": model.rope_theta,
            "time_factor": model.time_scale,
        }
        return settings, []

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
