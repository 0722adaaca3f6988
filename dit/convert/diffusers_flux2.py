"""Convert diffusers' `Flux2Transformer2DModel` (FLUX.2) to and from our FLUX.2.

Differences of diffusers' model, besides those in `dit.convert.diffusers_streams`:

* the three shared modulations are separate matrices;
* a single block has one input matrix with q, k, v, gates and values of the MLP in turn, and one output matrix with all
  inputs of attention first, while ours are ordered by head;
* all gates of a SwiGLU come first, then all values; ours alternate.

Source: diffusers 0.38, `models/transformers/transformer_flux2.py` and `pipelines/flux2`, names and settings.
"""

from collections.abc import Mapping
from typing import Any

from dit.convert.diffusers_format import LatentSize, TrainedModel, mlp_ratio
from dit.convert.diffusers_streams import (
    COMFYUI_ATTENTION,
    IMAGE,
    TEXT,
    DiffusersStreams,
    StreamNames,
    head_norms,
    outer_names,
)
from dit.convert.rules import ByHead, Rule
from dit.models.flux2.config import Flux2Config

DEV_GUIDANCE = 4.0
KLEIN_GUIDANCE = 4.0  # of the models without distillation
TIME_SHIFT = 7.5  # of the pipeline at 50 steps and 4096 tokens (exp(2.02))


class DiffusersFlux2(DiffusersStreams[Flux2Config]):
    """`Flux2Transformer2DModel`."""

    class_name = "Flux2Transformer2DModel"
    config_class = Flux2Config
    fixed = ("patch_size", "out_channels", "timestep_guidance_channels")
    names: Mapping[str, str] = outer_names("time_guidance_embed", time="timestep", guidance="guidance")
    free = frozenset({"num_single_layers", "guidance", "layernorm_epsilon", "rope_theta"})
    streams: Mapping[str, StreamNames] = {
        "image": IMAGE("ff.linear_in", "ff.linear_out"),
        "text": TEXT("ff_context.linear_in", "ff_context.linear_out"),
    }

    comfyui = (
        *COMFYUI_ATTENTION,
        (r"transformer_blocks\.(\d+)\.ff\.linear_in", r"double_blocks.\1.img_mlp.0"),
        (r"transformer_blocks\.(\d+)\.ff\.linear_out", r"double_blocks.\1.img_mlp.2"),
        (r"transformer_blocks\.(\d+)\.ff_context\.linear_in", r"double_blocks.\1.txt_mlp.0"),
        (r"transformer_blocks\.(\d+)\.ff_context\.linear_out", r"double_blocks.\1.txt_mlp.2"),
        (r"single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
        (r"single_transformer_blocks\.(\d+)\.attn\.to_out", r"single_blocks.\1.linear2"),
    )

    def read(self, published: Mapping[str, Any]) -> TrainedModel:
        sizes = self.sizes(published)
        model = Flux2Config(
            **sizes,
            num_single_layers=published["num_single_layers"],
            ffn_hidden_size=int(sizes["hidden_size"] * published["mlp_ratio"]),
            guidance=DEV_GUIDANCE if published["guidance_embeds"] else None,
            rope_theta=float(published["rope_theta"]),
            layernorm_epsilon=published["eps"],
            null_text="learned" if published["guidance_embeds"] else "empty",
        )
        guidance_scale = KLEIN_GUIDANCE if model.guidance is None else 1.0
        return self.trained(model, time_shift=TIME_SHIFT, num_steps=50, guidance_scale=guidance_scale)

    def write(self, model: Flux2Config, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        settings = self.write_sizes(model) | {
            "num_single_layers": model.num_single_layers,
            "mlp_ratio": mlp_ratio(model.ffn_size, model.hidden_size),
            "guidance_embeds": model.guidance is not None,
            "rope_theta": model.rope_theta,
            "eps": model.layernorm_epsilon,
        }
        return settings, []

    def shared(self, model: Flux2Config) -> list[Rule]:
        kinds = ("double_stream_modulation_txt", "double_stream_modulation_img", "single_stream_modulation")
        rows = ByHead(1, tuple(n * 3 * model.hidden_size for n in (2, 2, 1)))
        return [Rule("modulation.linear.weight", tuple(f"{kind}.linear.weight" for kind in kinds), rows)]

    def single(self, model: Flux2Config, layer: str, block: str) -> list[Rule]:
        heads, size, share = model.num_attention_heads, model.head_size, model.ffn_size // model.num_attention_heads
        inward = ByHead(heads, (size, size, size, share, share), turned=(0, 1), alternate=True, fused=True)
        outward = ByHead(heads, (size, share), fused=True, dim=1)
        return [
            Rule(f"{layer}.linear_in.weight", (f"{block}.attn.to_qkv_mlp_proj.weight",), inward),
            Rule(f"{layer}.linear_out.weight", (f"{block}.attn.to_out.weight",), outward),
            *head_norms(layer, f"{block}.attn.norm_q", f"{block}.attn.norm_k"),
        ]
