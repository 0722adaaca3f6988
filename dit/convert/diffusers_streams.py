"""Conversion of models with text and image as two streams (`dit.models.streams`), common to their diffusers classes.

Features that rotate together are adjacent in diffusers; ours have a distance of half a head, so the rows of q and k and
the weights of their norms are permuted. The last modulation is ordered scale, then shift.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from dit.convert.diffusers_format import DiffusersFormat, LatentSize, patches
from dit.convert.rules import Form, SwappedHalves
from dit.errors import ConfigError
from dit.models.streams.config import StreamsConfig

PATCH = 2  # fixed in the pipelines
LATENT_SIZE = (1, 128, 128)  # 1024 px; not in the settings
JOINT = {
    "layers.#.image.linear_qkv": "transformer_blocks.#.attn.to_(q|k|v)",
    "layers.#.text.linear_qkv": "transformer_blocks.#.attn.add_(q|k|v)_proj",
    "layers.#.(image|text).linear_proj": "transformer_blocks.#.attn.(to_out.0|to_add_out)",
    "layers.#.(image|text).(q|k)_layernorm": "transformer_blocks.#.attn.norm_(|added_)(q|k)",
    "embed.linear": "x_embedder",
    "embed_text": "context_embedder",
    "head.modulation": "norm_out.linear",
    "head.linear": "proj_out",
}
"""Names of joint attention, and of the layers around the blocks."""
FEED_FORWARD = {
    "layers.#.(image|text).modulation.linear": "transformer_blocks.#.norm1(|_context).linear",
    "layers.#.(image|text).mlp.linear_fc(1|2)": "transformer_blocks.#.ff(|_context).net.(0.proj|2)",
}
"""Names of MLPs and modulations in FLUX.1, Stable Diffusion 3 and HunyuanVideo."""
EMBEDDERS = {"conditioner.(time|pooled).linear_(1|2)": "time_text_embed.(timestep|text)_embedder.linear_(1|2)"}
"""Names of the embedders of time and pooled text in FLUX.1, Stable Diffusion 3 and Qwen-Image."""
COMFYUI_ATTENTION = {
    "double_blocks.#.img_attn.qkv": "transformer_blocks.#.attn.to_(q|k|v)",
    "double_blocks.#.txt_attn.qkv": "transformer_blocks.#.attn.add_(q|k|v)_proj",
    "double_blocks.#.(img|txt)_attn.proj": "transformer_blocks.#.attn.(to_out.0|to_add_out)",
}
"""ComfyUI's names of the layers of joint attention in FLUX."""

Model = TypeVar("Model", bound=StreamsConfig)


class DiffusersStreams(DiffusersFormat[Model]):
    """A diffusers class for a family of `StreamsConfig`."""

    def forms(self, model: Model) -> Mapping[str, Form]:
        return {**super().forms(model), "head.modulation": SwappedHalves()}


class DiffusersTokens(DiffusersStreams[Model]):
    """A class whose `in_channels` are those of a token: its pipeline cuts patches of 2 x 2, channels slowest."""

    latent_size = LATENT_SIZE

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        sizes = super().read_sizes(published)
        for name in ("in_channels", "out_channels"):
            if sizes.get(name) is None:
                continue
            sizes[name], rest = divmod(sizes[name], PATCH**2)
            if rest:
                raise ConfigError(
                    f"{name}={published[name]} is not a multiple of {PATCH**2}, the positions of a patch of {PATCH} x "
                    f"{PATCH}, which the pipelines of {self.class_name} cut; use a network of such patches"
                )
        return sizes if "ffn_hidden_size" in sizes else sizes | {"ffn_hidden_size": 4 * sizes["hidden_size"]}

    def write_sizes(self, model: Any, latent_size: LatentSize) -> dict[str, Any]:
        out_channels = None if model.output_features == model.token_channels else model.output_features
        channels = {"in_channels": model.input_features, "out_channels": out_channels}
        return super().write_sizes(model, latent_size) | channels

    def forms(self, model: Model) -> Mapping[str, Form]:
        parts = model.input_features // model.token_channels  # a control picture follows the latent (FLUX.1)
        return {
            **super().forms(model),
            "embed.linear.weight": patches("d (parts c ph pw) -> d (parts ph pw c)", model, parts=parts),
            "head.linear": patches("(c ph pw) ... -> (ph pw c) ...", model),
        }
