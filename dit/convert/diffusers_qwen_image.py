"""Convert diffusers' `QwenImageTransformer2DModel` (Qwen-Image) to and from our Qwen-Image.

Source: diffusers 0.38, `models/transformers/transformer_qwenimage.py` and `pipelines/qwenimage`, names and settings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dit.convert.diffusers_format import LatentSize, TrainedModel
from dit.convert.diffusers_streams import IMAGE, TEXT, DiffusersStreams, StreamNames
from dit.models.qwen_image.config import QwenImageConfig


class DiffusersQwenImage(DiffusersStreams[QwenImageConfig]):
    """`QwenImageTransformer2DModel`, without the further inputs of its layered models."""

    class_name = "QwenImageTransformer2DModel"
    config_class = QwenImageConfig
    fixed = ("patch_size", "guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
    free = frozenset({"clean_reference_time"})
    names: Mapping[str, str] = {
        "embed.linear": "img_in",
        "embed_text": "txt_in",
        "text_norm": "txt_norm",
        "conditioner.time.linear_1": "time_text_embed.timestep_embedder.linear_1",
        "conditioner.time.linear_2": "time_text_embed.timestep_embedder.linear_2",
        "head.modulation": "norm_out.linear",
        "head.linear": "proj_out",
    }
    streams: Mapping[str, StreamNames] = {
        "image": IMAGE("img_mlp.net.0.proj", "img_mlp.net.2", "img_mod.1"),
        "text": TEXT("txt_mlp.net.0.proj", "txt_mlp.net.2", "txt_mod.1"),
    }

    comfyui = ((r"transformer_blocks\..*", r"\g<0>"),)

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        sizes = self.sizes(published)
        # Without `out_channels`, diffusers predicts as many channels for each position as a token has.
        channels = published["out_channels"] or published["in_channels"]
        model = QwenImageConfig(
            **sizes,
            out_channels=None if channels == sizes["in_channels"] else channels,
            ffn_hidden_size=4 * sizes["hidden_size"],
            clean_reference_time=published["zero_cond_t"],
            null_text="empty",
        )
        trained = self.trained(model, time_shift=3.0, num_steps=50, guidance_scale=4.0)
        return replace(trained, sampling={**trained.sampling, "guidance_norm": True})

    def write(self, model: QwenImageConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        channels = {"out_channels": model.out_channels or model.in_channels}
        return self.write_sizes(model) | channels | {"zero_cond_t": model.clean_reference_time}, []
