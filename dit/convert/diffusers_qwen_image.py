"""Convert diffusers' `QwenImageTransformer2DModel` (Qwen-Image) to and from our Qwen-Image.

Source: diffusers 0.38, `models/transformers/transformer_qwenimage.py` and `pipelines/qwenimage`, names and settings.
"""

from collections.abc import Mapping
from typing import Any, Optional

from dit.convert.diffusers_format import LatentSize
from dit.convert.diffusers_streams import JOINT, DiffusersTokens, embedder_names
from dit.models.qwen_image.config import QwenImageConfig


class DiffusersQwenImage(DiffusersTokens[QwenImageConfig]):
    """`QwenImageTransformer2DModel`, without the further inputs of its layered models."""

    class_name = "QwenImageTransformer2DModel"
    config_class = QwenImageConfig
    fixed = ("patch_size", "guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
    same: Mapping[str, str] = {**DiffusersTokens.same, "clean_reference_time": "zero_cond_t"}
    free = ("in_channels",)
    names: Mapping[str, str] = {
        **JOINT,
        **embedder_names("time_text_embed", time="timestep"),
        "embed.linear": "img_in",
        "embed_text": "txt_in",
        "text_norm": "txt_norm",
        "layers.#.(image|text).modulation.linear": "transformer_blocks.#.(img|txt)_mod.1",
        "layers.#.image.mlp.linear_fc(1|2)": "transformer_blocks.#.img_mlp.net.(0.proj|2)",
        "layers.#.text.mlp.linear_fc(1|2)": "transformer_blocks.#.txt_mlp.net.(0.proj|2)",
    }
    time_shift = 3.0
    sampling: Mapping[str, Any] = {"num_steps": 50, "guidance_scale": 4.0, "guidance_norm": True}

    def comfyui_name(self, layer: str) -> Optional[str]:
        return f"diffusion_model.{layer}" if layer.startswith("transformer_blocks.") else None

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        # `out_channels` counts the channels of a position; None means as many as those of a token.
        sizes = super().read_sizes({**published, "out_channels": None})
        channels = published["out_channels"] or published["in_channels"]
        return sizes | {"out_channels": None if channels == sizes["in_channels"] else channels}

    def write_sizes(self, model: QwenImageConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {"out_channels": model.out_channels or model.in_channels}
