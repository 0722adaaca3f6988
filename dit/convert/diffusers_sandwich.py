"""Convert diffusers' classes of models with `block=sandwich` to and from ours: Lumina-Image 2.0 and Z-Image.

Gates and values of a SwiGLU alternate in our matrix. The network predicts x0 - noise, the negated velocity, so the
weights of the head have the opposite sign. Patches have channels fastest, as ours, and the head has a scale only.

Source: diffusers 0.38, `models/transformers/transformer_lumina2.py`, `transformer_z_image.py`, `pipelines/lumina2` and
`pipelines/z_image`, names and settings.
"""

from collections.abc import Mapping
from typing import Any, Optional

from dit.convert.diffusers_format import LatentSize
from dit.convert.diffusers_streams import LATENT_SIZE, PATCH, DiffusersStreams, Model
from dit.convert.rules import SAME, Axes, ByHead, Form, Negated
from dit.models.streams.families import Lumina2Config, ZImageConfig

OURS, THEIRS = "(layers.#.image|layers.#.text|single.#)", "(noise_refiner.#|context_refiner.#|layers.#)"
"""Names of the blocks: refiners of image and text, and single blocks."""
MULTIPLE = 256


class DiffusersSandwich(DiffusersStreams[Model]):
    """A diffusers class for a family with `block=sandwich`."""

    def forms(self, model: Model) -> Mapping[str, Form]:
        return {
            **super().forms(model),
            "head.modulation": SAME,
            "head.linear": Negated(),
            f"{OURS}.mlp.linear_fc1": ByHead(1, (model.ffn_size,) * 2, alternate=True),
        }


class DiffusersLumina2(DiffusersSandwich[Lumina2Config]):
    """`Lumina2Transformer2DModel`."""

    class_name = "Lumina2Transformer2DModel"
    config_class = Lumina2Config
    other = ("axes_lens", "multiple_of", "ffn_dim_multiplier", "num_kv_heads")
    same: Mapping[str, str] = {
        "num_query_groups": "num_kv_heads",
        "num_joint_layers": "num_refiner_layers",
        "num_single_layers": "num_layers",
    }
    names: Mapping[str, str] = {
        "embed.linear": "x_embedder",
        "text_norm": "time_caption_embed.caption_embedder.0",
        "embed_text": "time_caption_embed.caption_embedder.1",
        "conditioner.time.linear_(1|2)": "time_caption_embed.timestep_embedder.linear_(1|2)",
        "head.(modulation|linear)": "norm_out.linear_(1|2)",
        f"{OURS}.modulation.linear": f"{THEIRS}.norm1.linear",
        f"{OURS}.attention_norm": "(noise_refiner.#.norm1.norm|context_refiner.#.norm1|layers.#.norm1.norm)",
        f"{OURS}.attention.linear_qkv": f"{THEIRS}.attn.to_(q|k|v)",
        f"{OURS}.attention.(q|k)_layernorm": f"{THEIRS}.attn.norm_(q|k)",
        f"{OURS}.attention.linear_proj": f"{THEIRS}.attn.to_out.0",
        f"{OURS}.(attention_output_norm|mlp_norm|mlp_output_norm)": f"{THEIRS}.(norm2|ffn_norm1|ffn_norm2)",
        f"{OURS}.mlp.linear_fc1": f"{THEIRS}.feed_forward.linear_(1|3)",
        f"{OURS}.mlp.linear_fc2": f"{THEIRS}.feed_forward.linear_2",
    }
    time_shift = 6.0  # of the published scheduler
    sampling: Mapping[str, Any] = {"num_steps": 50, "guidance_scale": 4.0}

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        sizes = super().read_sizes(published)
        if sizes["num_query_groups"] == sizes["num_attention_heads"]:
            sizes["num_query_groups"] = None
        multiple, factor = published["multiple_of"], published["ffn_dim_multiplier"]
        return sizes | {"ffn_hidden_size": _rounded_size(sizes["hidden_size"], multiple, factor)}

    def write_sizes(self, model: Lumina2Config, latent_size: LatentSize) -> dict[str, Any]:
        size, inner = model.hidden_size, model.ffn_size
        is_rounded = inner == _rounded_size(size, MULTIPLE, None)
        return super().write_sizes(model, latent_size) | {
            "out_channels": model.out_channels,
            "num_kv_heads": model.num_query_groups or model.num_attention_heads,
            "multiple_of": MULTIPLE if is_rounded else inner,
            "ffn_dim_multiplier": None if is_rounded else inner / (4 * size),
        }


def _rounded_size(size: int, multiple: int, factor: Optional[float]) -> int:
    return -(-int(4 * size * (1.0 if factor is None else factor)) // multiple) * multiple


class DiffusersZImage(DiffusersSandwich[ZImageConfig]):
    """`ZImageTransformer2DModel`, without the SigLIP embeddings of its editing model."""

    class_name = "ZImageTransformer2DModel"
    config_class = ZImageConfig
    other = ("axes_lens",)
    same: Mapping[str, str] = {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_joint_layers": "n_refiner_layers",
        "num_single_layers": "n_layers",
        "qk_layernorm": "qk_norm",
        "time_scale": "t_scale",
    }
    names: Mapping[str, str] = {
        "embed.linear": f"all_x_embedder.{PATCH}-1",
        "text_norm": "cap_embedder.0",
        "embed_text": "cap_embedder.1",
        "conditioner.time.linear_(1|2)": "t_embedder.mlp.(0|2)",
        "head.(modulation|linear)": f"all_final_layer.{PATCH}-1.(adaLN_modulation.1|linear)",
        "(text|image)_padding": "(cap|x)_pad_token",
        f"{OURS}.modulation.linear": f"{THEIRS}.adaLN_modulation.0",
        f"{OURS}.attention.linear_qkv": f"{THEIRS}.attention.to_(q|k|v)",
        f"{OURS}.attention.(q|k)_layernorm": f"{THEIRS}.attention.norm_(q|k)",
        f"{OURS}.attention.linear_proj": f"{THEIRS}.attention.to_out.0",
        f"{OURS}.(attention|mlp)_norm": f"{THEIRS}.(attention|ffn)_norm1",
        f"{OURS}.(attention|mlp)_output_norm": f"{THEIRS}.(attention|ffn)_norm2",
        f"{OURS}.mlp.linear_fc1": f"{THEIRS}.feed_forward.w(1|3)",
        f"{OURS}.mlp.linear_fc2": f"{THEIRS}.feed_forward.w2",
    }
    latent_size = LATENT_SIZE
    time_shift = 3.0  # of the published scheduler
    # The pipeline counts its scale from 0: 4 there is 5 here.
    sampling: Mapping[str, Any] = {"num_steps": 50, "guidance_scale": 5.0}

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        sizes = super().read_sizes(published)
        return sizes | {"ffn_hidden_size": int(sizes["hidden_size"] / 3 * 8)}

    def write_sizes(self, model: ZImageConfig, latent_size: LatentSize) -> dict[str, Any]:
        return super().write_sizes(model, latent_size) | {"n_kv_heads": model.num_attention_heads}

    def forms(self, model: ZImageConfig) -> Mapping[str, Form]:
        return {**super().forms(model), "(text|image)_padding": Axes("one d -> (one d)", {"one": 1})}
