"""Convert diffusers' `HunyuanVideo15Transformer3DModel` (HunyuanVideo 1.5) to and from our HunyuanVideo.

Source: diffusers 0.38, `models/transformers/transformer_hunyuan_video15.py`, names and settings; sampling of
Tencent-Hunyuan/HunyuanVideo-1.5, README.md.
"""

import math
from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import LatentSize, TrainedModel, patches
from dit.convert.diffusers_streams import FEED_FORWARD, JOINT, DiffusersStreams
from dit.convert.rules import ByHead, Form
from dit.errors import ConfigError
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.objectives.flow_matching import FlowMatching

FRAMES = 31  # of the latent of 121 frames; not in the settings
SIDE_480P = 40  # of the latent of a square with the area of the smaller models' clips
PIXELS = 16  # along each side of a latent position
EMBEDDERS, REFINER = "context_embedder.time_text_embed", "context_embedder.token_refiner.refiner_blocks.#"


class DiffusersHunyuanVideo(DiffusersStreams[HunyuanVideoConfig]):
    """`HunyuanVideo15Transformer3DModel`, without the second time of its super-resolution models."""

    class_name = "HunyuanVideo15Transformer3DModel"
    config_class = HunyuanVideoConfig
    other = ("target_size",)
    same: Mapping[str, str] = {
        "in_channels": "out_channels",
        "patch_spatial": "patch_size",
        "patch_temporal": "patch_size_t",
        "context_size": "text_embed_dim",
        "glyph_size": "text_embed_2_dim",
        "image_context_size": "image_embed_dim",
    }
    names: Mapping[str, str] = {
        **JOINT,
        **FEED_FORWARD,
        "embed.linear": "x_embedder.proj",
        "embed_text": "context_embedder.proj_in",
        "conditioner.time.linear_(1|2)": "time_embed.timestep_embedder.linear_(1|2)",
        "kinds": "cond_type_embed.weight",
        "glyph.(norm|linear_1|linear_2|linear_3)": "context_embedder_2.(norm|linear_1|linear_2|linear_3)",
        "image.(norm_in|linear_1|linear_2|norm_out)": "image_embedder.(norm_in|linear_1|linear_2|norm_out)",
        "refiner.time.linear_(1|2)": f"{EMBEDDERS}.timestep_embedder.linear_(1|2)",
        "refiner.linear_(1|2)": f"{EMBEDDERS}.text_embedder.linear_(1|2)",
        "refiner.layers.#.(attention_norm|mlp_norm)": f"{REFINER}.(norm1|norm2)",
        "refiner.layers.#.attention.linear_qkv": f"{REFINER}.attn.to_(q|k|v)",
        "refiner.layers.#.attention.linear_proj": f"{REFINER}.attn.to_out.0",
        "refiner.layers.#.mlp.linear_fc(1|2)": f"{REFINER}.ff.net.(0.proj|2)",
        "refiner.layers.#.gates": f"{REFINER}.norm_out.linear",
    }
    sampling: Mapping[str, Any] = {"solver": "euler", "num_steps": 50, "guidance_scale": 6.0}

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        if (task := published["task_type"]) not in ("t2v", "i2v"):
            raise ConfigError(f"task_type={task!r} is not supported; use a model with task_type='t2v' or 'i2v'")
        image_to_video = task == "i2v"
        return super().read_sizes(published) | {"out_channels": None, "image_to_video": image_to_video}

    def trained(self, model: HunyuanVideoConfig, published: Mapping[str, Any]) -> TrainedModel:
        side = published["target_size"] // PIXELS
        shift = 5.0 if side <= SIDE_480P else 7.0 if model.image_to_video else 9.0
        objective = FlowMatching(time_shift=shift, time_distribution="logit_normal")
        return TrainedModel(model, objective, (FRAMES, side, side), self.sampling)

    def write_sizes(self, model: HunyuanVideoConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {
            "in_channels": 2 * model.in_channels + 1,  # latent, first frame and mask
            "out_channels": model.in_channels,
            "target_size": PIXELS * math.isqrt(latent_size[1] * latent_size[2]),
            "task_type": "i2v" if model.image_to_video else "t2v",
        }

    def forms(self, model: HunyuanVideoConfig) -> Mapping[str, Form]:
        return {
            **super().forms(model),
            "embed.linear.weight": patches("d c pt ph pw -> d (ph pw pt c)", model),
            "head.linear": patches("(c pt ph pw) ... -> (ph pw pt c) ...", model),
            "refiner.layers.#.attention.linear_qkv": ByHead(model.num_attention_heads, (model.head_size,) * 3),
        }
