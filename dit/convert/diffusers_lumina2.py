"""Convert diffusers' `Lumina2Transformer2DModel` (Lumina-Image 2.0) to and from our Lumina 2.

Source: diffusers 0.38, `models/transformers/transformer_lumina2.py` and `pipelines/lumina2`, names and settings.
"""

from collections.abc import Mapping
from typing import Any, Optional

from dit.convert.diffusers_format import LatentSize, TrainedModel, square_side
from dit.convert.diffusers_sandwich import DiffusersSandwich
from dit.convert.diffusers_streams import PATCH
from dit.convert.rules import Rule, with_bias
from dit.models.lumina2.config import Lumina2Config
from dit.objectives.flow_matching import FlowMatching

TIME_SHIFT = 6.0  # of the published scheduler
MULTIPLE = 256


def _inner_size(size: int, multiple: int, factor: Optional[float]) -> int:
    """Return the inner width of the MLP for the width of the tokens."""
    return -(-int(4 * size * (1.0 if factor is None else factor)) // multiple) * multiple


class DiffusersLumina2(DiffusersSandwich[Lumina2Config]):
    """`Lumina2Transformer2DModel`."""

    class_name = "Lumina2Transformer2DModel"
    config_class = Lumina2Config
    fixed = ("patch_size", "norm_eps", "scaling_factor")
    names: Mapping[str, str] = {
        "embed.linear": "x_embedder",
        "text_norm": "time_caption_embed.caption_embedder.0",
        "embed_text": "time_caption_embed.caption_embedder.1",
        "conditioner.time.linear_1": "time_caption_embed.timestep_embedder.linear_1",
        "conditioner.time.linear_2": "time_caption_embed.timestep_embedder.linear_2",
        "head.modulation": "norm_out.linear_1",
        "head.linear": "norm_out.linear_2",
    }
    free = frozenset({"num_single_layers", "num_query_groups"})
    attention = "attn"
    parts: Mapping[str, str] = {
        "modulation.linear": "norm1.linear",
        "attention_output_norm": "norm2",
        "mlp_norm": "ffn_norm1",
        "mlp_output_norm": "ffn_norm2",
    }
    mlp = ("linear_1", "linear_3", "linear_2")

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        size, heads, groups = (published[name] for name in ("hidden_size", "num_attention_heads", "num_kv_heads"))
        channels, out_channels = published["in_channels"], published["out_channels"]
        model = Lumina2Config(
            in_channels=channels,
            out_channels=None if out_channels in (None, channels) else out_channels,
            context_size=published["cap_feat_dim"],
            hidden_size=size,
            num_attention_heads=heads,
            num_query_groups=None if groups in (None, heads) else groups,
            num_joint_layers=published["num_refiner_layers"],
            num_single_layers=published["num_layers"],
            ffn_hidden_size=_inner_size(size, published["multiple_of"], published["ffn_dim_multiplier"]),
            rope_axes=list(published["axes_dim_rope"]),
            null_text="empty",
        )
        sampling = {"solver": "euler", "num_steps": 50, "guidance_scale": 4.0}
        latent_size = (1, published["sample_size"], published["sample_size"])
        return TrainedModel(model, FlowMatching(time_shift=TIME_SHIFT), latent_size, sampling)

    def inner_size(self, hidden_size: int) -> Optional[int]:
        return None

    def write(self, model: Lumina2Config, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        self.check(model)
        side, _ = square_side(self.class_name, latent_size, PATCH)  # no effect on the network
        size, inner = model.hidden_size, model.ffn_size
        is_rounded = inner == _inner_size(size, MULTIPLE, None)
        settings = {
            "sample_size": side,
            "in_channels": model.in_channels,
            "out_channels": model.out_channels,
            "hidden_size": size,
            "num_layers": model.num_single_layers,
            "num_refiner_layers": model.num_joint_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_kv_heads": model.num_query_groups or model.num_attention_heads,
            "multiple_of": MULTIPLE if is_rounded else inner,
            "ffn_dim_multiplier": None if is_rounded else inner / (4 * size),
            "axes_dim_rope": list(model.rope_axes),
            "cap_feat_dim": model.context_size,
        }
        return settings, []

    def single(self, model: Lumina2Config, layer: str, block: str) -> list[Rule]:
        norm = "norm1" if block.startswith("context") else "norm1.norm"
        return [*super().single(model, layer, block), *with_bias(f"{layer}.attention_norm", f"{block}.{norm}")]
