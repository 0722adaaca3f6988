"""Convert diffusers' `SD3Transformer2DModel` (Stable Diffusion 3 and 3.5) to and from our SD3.

Differences of diffusers' model, besides those in `dit.convert.diffusers_streams`:

* a convolution embeds patches, and files have the table of positions, which our model computes;
* heads do not rotate, so their features have the same order;
* the text of the last block is modulated by scale, then shift;
* the second attention of the image has separate matrices, too.

Source: diffusers 0.38, `models/transformers/transformer_sd3.py`, `models/attention.py`, `models/embeddings.py` and
`pipelines/stable_diffusion_3`, names and settings. ComfyUI's names are those of Stability-AI/sd3.5, `mmditx.py`. The
modulations of texts have none, because the last one is ordered scale, then shift, only in diffusers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dit.convert.diffusers_format import LatentSize, TrainedModel
from dit.convert.diffusers_streams import (
    IMAGE,
    SELF_ATTENTION,
    TEXT,
    DiffusersStreams,
    StreamNames,
    attention_rules,
    outer_names,
)
from dit.convert.rules import TRAIN_THAT_WAY, Axes, Chunks, Form, Rule, RuleBook, Shape, require
from dit.errors import ConfigError
from dit.layers.positions import sincos
from dit.models.sd3.config import SD3Config
from dit.objectives.flow_matching import FlowMatching
from dit.patchify import grid_positions


class DiffusersSD3(DiffusersStreams[SD3Config]):
    """`SD3Transformer2DModel`."""

    class_name = "SD3Transformer2DModel"
    config_class = SD3Config
    names: Mapping[str, str] = {
        **outer_names("time_text_embed", time="timestep", pooled="text"),
        "embed.linear": "pos_embed.proj",
    }
    free = frozenset({"pooled_size", "patch_spatial", "num_dual_layers", "qk_layernorm", "position_crop"})
    streams: Mapping[str, StreamNames] = {
        "image": IMAGE("ff.net.0.proj", "ff.net.2", "norm1.linear"),
        "text": TEXT("ff_context.net.0.proj", "ff_context.net.2", "norm1_context.linear"),
    }
    comfyui = tuple(
        (rf"transformer_blocks\.(\d+)\.{theirs}", rf"joint_blocks.\1.{stream}_block.{ours}")
        for stream, theirs, ours in (
            ("x", r"attn(2?)\.to_[qkv]", r"attn\2.qkv"),
            ("x", r"attn(2?)\.to_out\.0", r"attn\2.proj"),
            ("x", r"ff\.net\.0\.proj", "mlp.fc1"),
            ("x", r"ff\.net\.2", "mlp.fc2"),
            ("x", r"norm1\.linear", "adaLN_modulation.1"),
            ("context", r"attn\.add_[qkv]_proj", "attn.qkv"),
            ("context", r"attn\.to_add_out", "attn.proj"),
            ("context", r"ff_context\.net\.0\.proj", "mlp.fc1"),
            ("context", r"ff_context\.net\.2", "mlp.fc2"),
        )
    )

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        heads, size, patch = published["num_attention_heads"], published["sample_size"], published["patch_size"]
        width, dual = heads * published["attention_head_dim"], list(published["dual_attention_layers"])
        norm, text_width = published["qk_norm"], published["caption_projection_dim"]
        values = {"caption_projection_dim": text_width, "dual_attention_layers": dual, "qk_norm": norm}
        supported = {
            "caption_projection_dim": width,
            "dual_attention_layers": list(range(len(dual))),
            "qk_norm": norm and "rms_norm",
        }
        require(f"{self.class_name} differs from our model", values, supported, "such weights cannot be imported")
        channels, out_channels = published["in_channels"], published["out_channels"]
        model = SD3Config(
            in_channels=channels,
            out_channels=None if out_channels in (None, channels) else out_channels,
            patch_spatial=patch,
            context_size=published["joint_attention_dim"],
            pooled_size=published["pooled_projection_dim"],
            hidden_size=width,
            num_attention_heads=heads,
            num_joint_layers=published["num_layers"],
            num_dual_layers=len(dual),
            qk_layernorm=norm is not None,
            position_crop=[published["pos_embed_max_size"], size // patch],
            null_text="empty",
        )
        sampling = {"solver": "euler", "num_steps": 28, "guidance_scale": 4.5}
        return TrainedModel(model, FlowMatching(time_shift=3.0), (1, size, size), sampling)

    def write(self, model: SD3Config, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        self.check(model)
        if model.pooled_size is None or model.position_crop is None:
            raise ConfigError(
                f"model.pooled_size={model.pooled_size} and model.position_crop={model.position_crop}, but "
                f"{self.class_name} needs a pooled text and cropped positions; {TRAIN_THAT_WAY}"
            )
        side, span = model.position_crop
        settings = {
            "sample_size": span * model.patch_spatial,
            "patch_size": model.patch_spatial,
            "in_channels": model.in_channels,
            "num_layers": model.num_joint_layers,
            "attention_head_dim": model.head_size,
            "num_attention_heads": model.num_attention_heads,
            "joint_attention_dim": model.context_size,
            "caption_projection_dim": model.hidden_size,
            "pooled_projection_dim": model.pooled_size,
            "out_channels": model.out_channels or model.in_channels,
            "pos_embed_max_size": side,
            "dual_attention_layers": list(range(model.num_dual_layers)),
            "qk_norm": "rms_norm" if model.qk_layernorm else None,
        }
        return settings, []

    def forms(self, model: SD3Config) -> Mapping[str, Form]:
        patch = {"ph": model.patch_spatial, "pw": model.patch_spatial}
        return {
            "embed.linear.weight": Axes("d c ph pw -> d (ph pw c)", patch),
            f"layers.{model.num_joint_layers - 1}.text.modulation.linear": Chunks((1, 0)),
        }

    def joint(self, model: SD3Config, layer: str, block: str) -> list[Rule]:
        second = (f"{block}.attn2.{name}" for name in SELF_ATTENTION)
        dual = attention_rules(model, f"{layer}.image.dual_attention", *second)
        return [*super().joint(model, layer, block), *dual]

    def rules(self, model: SD3Config, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        side, span = model.position_crop or (1, 1)
        table = sincos(grid_positions((1, side, side)) / (side / span), model.hidden_size, "sincos_2d")
        book = super().rules(model, shapes, latent_size)
        return replace(book, tables={"pos_embed.pos_embed": table[None]}, stored_tables=True)
