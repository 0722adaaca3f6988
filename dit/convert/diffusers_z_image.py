"""Convert diffusers' `ZImageTransformer2DModel` (Z-Image) to and from our Z-Image.

Source: diffusers 0.38, `models/transformers/transformer_z_image.py` and `pipelines/z_image`, names and settings.
"""

from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import LatentSize, TrainedModel
from dit.convert.diffusers_sandwich import DiffusersSandwich
from dit.convert.diffusers_streams import LATENT_SIZE, PATCH
from dit.convert.rules import Axes, Rule, require
from dit.models.z_image.config import ZImageConfig
from dit.objectives.flow_matching import FlowMatching

TIME_SHIFT = 3.0  # of the published scheduler


class DiffusersZImage(DiffusersSandwich[ZImageConfig]):
    """`ZImageTransformer2DModel`, without the SigLIP embeddings of its editing model."""

    class_name = "ZImageTransformer2DModel"
    config_class = ZImageConfig
    fixed = ("norm_eps", "siglip_feat_dim")
    names: Mapping[str, str] = {
        "embed.linear": f"all_x_embedder.{PATCH}-1",
        "text_norm": "cap_embedder.0",
        "embed_text": "cap_embedder.1",
        "conditioner.time.linear_1": "t_embedder.mlp.0",
        "conditioner.time.linear_2": "t_embedder.mlp.2",
        "head.modulation": f"all_final_layer.{PATCH}-1.adaLN_modulation.1",
        "head.linear": f"all_final_layer.{PATCH}-1.linear",
    }
    free = frozenset({"num_single_layers", "qk_layernorm", "rope_theta", "time_scale"})
    attention = "attention"
    parts: Mapping[str, str] = {
        "modulation.linear": "adaLN_modulation.0",
        "attention_norm": "attention_norm1",
        "attention_output_norm": "attention_norm2",
        "mlp_norm": "ffn_norm1",
        "mlp_output_norm": "ffn_norm2",
    }
    mlp = ("w1", "w3", "w2")

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        size, heads = published["dim"], published["n_heads"]
        values = {name: published[name] for name in ("all_patch_size", "all_f_patch_size", "n_kv_heads")}
        values |= {name: list(values[name]) for name in ("all_patch_size", "all_f_patch_size")}
        supported = {"all_patch_size": [PATCH], "all_f_patch_size": [1], "n_kv_heads": heads}
        require(f"{self.class_name} differs from our model", values, supported, "such weights cannot be imported")
        model = ZImageConfig(
            in_channels=published["in_channels"],
            context_size=published["cap_feat_dim"],
            hidden_size=size,
            num_attention_heads=heads,
            num_joint_layers=published["n_refiner_layers"],
            num_single_layers=published["n_layers"],
            ffn_hidden_size=self.inner_size(size),
            qk_layernorm=published["qk_norm"],
            rope_theta=float(published["rope_theta"]),
            time_scale=float(published["t_scale"]),
            rope_axes=list(published["axes_dims"]),
            null_text="empty",
        )
        notes = [f"config.json has no latent size; {LATENT_SIZE[1]} x {LATENT_SIZE[2]} is assumed"]
        # The pipeline counts its scale from 0: 4 there is 5 here.
        sampling = {"solver": "euler", "num_steps": 50, "guidance_scale": 5.0}
        return TrainedModel(model, FlowMatching(time_shift=TIME_SHIFT), LATENT_SIZE, sampling, notes=notes)

    def inner_size(self, hidden_size: int) -> int:
        return int(hidden_size / 3 * 8)

    def write(self, model: ZImageConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        self.check(model)
        settings = {
            "in_channels": model.in_channels,
            "dim": model.hidden_size,
            "n_layers": model.num_single_layers,
            "n_refiner_layers": model.num_joint_layers,
            "n_heads": model.num_attention_heads,
            "n_kv_heads": model.num_attention_heads,
            "qk_norm": model.qk_layernorm,
            "cap_feat_dim": model.context_size,
            "rope_theta": model.rope_theta,
            "t_scale": model.time_scale,
            "axes_dims": list(model.rope_axes),
        }
        return settings, []

    def shared(self, model: ZImageConfig) -> list[Rule]:
        pairs = {"text_padding": "cap_pad_token", "image_padding": "x_pad_token"}
        return [Rule(ours, (theirs,), Axes("one d -> (one d)", {"one": 1})) for ours, theirs in pairs.items()]
