"""Convert diffusers' `HunyuanVideo15Transformer3DModel` (HunyuanVideo 1.5) to and from our HunyuanVideo.

Source: diffusers 0.38, `models/transformers/transformer_hunyuan_video15.py`, names and settings; sampling of
Tencent-Hunyuan/HunyuanVideo-1.5, README.md.
"""

import math
from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import LatentSize, TrainedModel, mlp_ratio
from dit.convert.diffusers_streams import IMAGE, SELF_ATTENTION, TEXT, DiffusersStreams, StreamNames
from dit.convert.rules import Axes, ByHead, Form, Rule, require, with_bias
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.objectives.flow_matching import FlowMatching

FRAMES = 31  # of the latent of 121 frames; not in the settings
SIDE_480P = 40  # of the latent of a square with the area of the smaller models' clips
PIXELS = 16  # along each side of a latent position
TASKS = {"t2v": False, "i2v": True}
REFINER = "context_embedder.token_refiner.refiner_blocks"


def _pairs(ours: str, theirs: str, *layers: str) -> dict[str, str]:
    return {f"{ours}.{layer}": f"{theirs}.{layer}" for layer in layers}


class DiffusersHunyuanVideo(DiffusersStreams[HunyuanVideoConfig]):
    """`HunyuanVideo15Transformer3DModel`, without the second time of its super-resolution models."""

    class_name = "HunyuanVideo15Transformer3DModel"
    config_class = HunyuanVideoConfig
    fixed = ("qk_norm", "use_meanflow")
    names: Mapping[str, str] = {
        "embed.linear": "x_embedder.proj",
        "embed_text": "context_embedder.proj_in",
        **_pairs("conditioner.time", "time_embed.timestep_embedder", "linear_1", "linear_2"),
        **_pairs("refiner.time", "context_embedder.time_text_embed.timestep_embedder", "linear_1", "linear_2"),
        **_pairs("refiner", "context_embedder.time_text_embed.text_embedder", "linear_1", "linear_2"),
        **_pairs("glyph", "context_embedder_2", "norm", "linear_1", "linear_2", "linear_3"),
        **_pairs("image", "image_embedder", "norm_in", "linear_1", "linear_2", "norm_out"),
        "head.modulation": "norm_out.linear",
        "head.linear": "proj_out",
    }
    streams: Mapping[str, StreamNames] = {
        "image": IMAGE("ff.net.0.proj", "ff.net.2", "norm1.linear"),
        "text": TEXT("ff_context.net.0.proj", "ff_context.net.2", "norm1_context.linear"),
    }
    free = frozenset(
        {
            *("patch_spatial", "patch_temporal", "rope_theta", "num_refiner_layers", "glyph_size"),
            *("image_context_size", "image_to_video"),
        }
    )

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        width, channels = published["num_attention_heads"] * published["attention_head_dim"], published["out_channels"]
        values = {"in_channels": published["in_channels"], "task_type": published["task_type"] in TASKS}
        supported = {"in_channels": 2 * channels + 1, "task_type": True}
        require(f"{self.class_name} differs from our model", values, supported, "such weights cannot be imported")
        model = HunyuanVideoConfig(
            in_channels=channels,
            patch_spatial=published["patch_size"],
            patch_temporal=published["patch_size_t"],
            context_size=published["text_embed_dim"],
            glyph_size=published["text_embed_2_dim"],
            image_context_size=published["image_embed_dim"],
            hidden_size=width,
            num_attention_heads=published["num_attention_heads"],
            num_joint_layers=published["num_layers"],
            num_refiner_layers=published["num_refiner_layers"],
            ffn_hidden_size=int(published["mlp_ratio"] * width),
            rope_theta=float(published["rope_theta"]),
            rope_axes=list(published["rope_axes_dim"]),
            image_to_video=TASKS[published["task_type"]],
            null_text="empty",
        )
        side = published["target_size"] // PIXELS
        shift = 5.0 if side <= SIDE_480P else 7.0 if model.image_to_video else 9.0
        sampling = {"solver": "euler", "num_steps": 50, "guidance_scale": 6.0}
        return TrainedModel(model, FlowMatching(time_shift=shift), (FRAMES, side, side), sampling)

    def write(self, model: HunyuanVideoConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        self.check(model)
        settings = {
            "in_channels": 2 * model.in_channels + 1,
            "out_channels": model.in_channels,
            "num_attention_heads": model.num_attention_heads,
            "attention_head_dim": model.head_size,
            "num_layers": model.num_joint_layers,
            "num_refiner_layers": model.num_refiner_layers,
            "mlp_ratio": mlp_ratio(model.ffn_size, model.hidden_size),
            "patch_size": model.patch_spatial,
            "patch_size_t": model.patch_temporal,
            "text_embed_dim": model.context_size,
            "text_embed_2_dim": model.glyph_size,
            "image_embed_dim": model.image_context_size,
            "rope_theta": model.rope_theta,
            "rope_axes_dim": list(model.rope_axes),
            "target_size": PIXELS * math.isqrt(latent_size[1] * latent_size[2]),
            "task_type": next(task for task, image in TASKS.items() if image == model.image_to_video),
        }
        return settings, []

    def shared(self, model: HunyuanVideoConfig) -> list[Rule]:
        rules = [Rule("kinds", ("cond_type_embed.weight",))]
        form = ByHead(model.num_attention_heads, (model.head_size,) * 3)
        for i in range(model.num_refiner_layers):
            layer, block = f"refiner.layers.{i}", f"{REFINER}.{i}"
            q, k, v, out = (f"{block}.attn.{name}" for name in SELF_ATTENTION[:4])
            rules += [
                *with_bias(f"{layer}.attention_norm", f"{block}.norm1"),
                *with_bias(f"{layer}.attention.linear_qkv", q, k, v, form=form),
                *with_bias(f"{layer}.attention.linear_proj", out),
                *with_bias(f"{layer}.mlp_norm", f"{block}.norm2"),
                *with_bias(f"{layer}.mlp.linear_fc1", f"{block}.ff.net.0.proj"),
                *with_bias(f"{layer}.mlp.linear_fc2", f"{block}.ff.net.2"),
                *with_bias(f"{layer}.gates", f"{block}.norm_out.linear"),
            ]
        return rules

    def forms(self, model: HunyuanVideoConfig) -> Mapping[str, Form]:
        patch = {"pt": model.patch_temporal, "ph": model.patch_spatial, "pw": model.patch_spatial}
        return {
            "embed.linear.weight": Axes("d c pt ph pw -> d (ph pw pt c)", patch),
            "head.linear": Axes("(c pt ph pw) ... -> (ph pw pt c) ...", patch),
        }
