"""Table of the backbones that the tests of this folder compare, one row each, and packs for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Optional

from dit.batch import PackedBatch
from dit.models.base import ModelConfig
from dit.models.lora_config import LoRAConfig
from dit.models.routing_config import RoutingConfig
from dit.objectives.autoencoding import Autoencoding
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.vq_autoencoding import VQAutoencoding
from dit.parallel.dims import ParallelConfig
from dit.run_config import RunConfig
from dit.verify.tiny import tiny_model
from launch.config_file import built
from launch.train import call_recipe
from launch.verify import MockPacks


@dataclass(frozen=True, kw_only=True)
class Row:
    """A backbone, as the tiny form of one of its recipes.

    Attributes:
        recipe: argument of `--factory`.
        quick: layouts without the mark `slow`; `tests/parallel/test_layouts.py` has quick layouts of DiT.
        other: another value for each field, in addition to `OTHER`.
        requires: settings without which a field has no effect, in addition to `REQUIRES`; set on both sides.
        also: settings that must change together with a field.
        refused: fields whose value in `OTHER` is refused.
        without_effect: fields that change no number of a training step, and why.
        text_tokens: length of the texts that are dropped.
        objective: objective of the training steps.
        idle: regular expression of parameters that change no output.
    """

    recipe: str
    quick: tuple[str, ...] = ()
    other: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    also: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    without_effect: Mapping[str, str] = field(default_factory=dict)
    text_tokens: int = 5
    objective: Objective = field(default_factory=FlowMatching)
    idle: str = "none"


CLASSES, TEXT = {"num_classes": 5}, {"context_size": 12}
ROTARY = {"position_embedding": "rope_3d"}
LEARNED = {**ROTARY, "max_grid": [128, 120, 120]}  # rotary positions require the default size of the tables
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 2.0}
TOP_K = {**EXPERTS, "moe_router": "top_k"}
TWO_PAIRS = {"num_attention_heads": 2, "rope_axes": [4, 4, 4, 4]}
SD3_ROTARY = {**ROTARY, "position_crop": None, "rope_axes": [2, 2, 4]}
REQUIRES: dict[str, dict[str, Any]] = {
    "rope_axes": ROTARY,
    "class_dropout": CLASSES,
    "context_dropout": TEXT,
    "rope_theta": ROTARY,
    "rope_factors": ROTARY,
    "rope_scaling": {**ROTARY, "rope_factors": [2.0, 3.0, 2.0]},
    "moe_ffn_hidden_size": EXPERTS,
    "moe_router": EXPERTS,
    "moe_capacity_factor": EXPERTS,
    "moe_top_k": TOP_K,
    "moe_aux_loss_coeff": TOP_K,
}
MOE = tuple(name for name in REQUIRES if "moe" in name)
"""Settings of experts, which are refused without experts."""
OTHER: dict[str, Any] = {
    "in_channels": 6,
    "control_channels": 3,
    "patch_spatial": lambda value: 3 - value,
    "patch_temporal": 2,
    "num_classes": 9,
    "class_dropout": 0.9,
    "context_size": 20,
    "context_dropout": 0.9,
    "null_text": "empty",
    "pooled_size": 9,
    "hidden_size": 64,
    "num_layers": lambda value: 2 * value,
    "num_joint_layers": lambda value: 2 * value,
    "num_single_layers": 2,
    "num_attention_heads": 2,
    "num_query_groups": lambda value: 4 if value == 2 else 2,
    "ffn_hidden_size": 64,
    "out_channels": 8,
    "approximator": [16, 32, 1],
    "activation": lambda value: "swiglu" if value == "gelu_tanh" else "gelu_tanh",
    "num_dual_layers": lambda value: 1 - value,
    "position_crop": [40, 30],
    "qk_layernorm": lambda value: not value,
    "add_bias": lambda value: not value,
    "layernorm_epsilon": 1e-3,
    "fps_conditioning": lambda value: not value,
    "size_conditioning": True,
    "time_scale": 7.0,
    "time_frequency_shift": 1,
    "interval_conditioning": True,
    "rms_norm": lambda value: not value,
    "class_tokens": lambda value: [2, 0],
    "teacher_token_size": 5,
    "value_residual": lambda value: not value,
    "wide_head": [1, 48, 4],
    "bottleneck_size": lambda value: 6 if value is None else None,
    "adaln_lora_rank": 4,
    "guidance": 3.5,
    "position_embedding": "sincos_3d",
    "rope_theta": 50.0,
    "rope_scaling": "linear",
    "rope_factors": [4.0, 1.0, 1.0],
    "rope_axes": [4, 2, 2],
    "num_experts": lambda value: 8 if value == 4 else 4,
    "moe_ffn_hidden_size": 24,
    "moe_router": "top_k",
    "moe_capacity_factor": 1.0,
    "moe_top_k": 1,
    "moe_aux_loss_coeff": 0.5,
    "lora": LoRAConfig(rank=2),
    "routing": lambda value: RoutingConfig(first_layers=1, last_layers=0) if value is None else None,
}
LEARNED_POSITIONS: dict[str, Any] = {
    "requires": {
        **{name: {**REQUIRES[name], **LEARNED} for name in ("rope_theta", "rope_factors", "rope_scaling")},
        "ffn_hidden_size": {"moe_ffn_hidden_size": None},
    },
    "also": {"position_embedding": {"max_grid": LEARNED["max_grid"]}},
    "other": {"max_grid": [4, 5, 6]},
}
IMAGEN_OTHER: dict[str, Any] = {
    **{"hidden_size": 64, "channel_multipliers": [2, 1], "num_res_blocks": [1, 2], "attention_levels": [0, 1]},
    **{"attention_type": "stacked", "head_size": 16, "norm_num_groups": 2, "stable_attention": True},
    **{"low_resolution_factor": 4, "low_resolution_kernel": "pil", "noise_augmentation": False},
}
IMAGEN: dict[str, Any] = {
    "requires": {"num_attention_heads": {"head_size": None}},
    "refused": ("patch_temporal",),
    "text_tokens": 1,  # in fused attention, k null tokens have k times the weight of one
    "objective": EDM(),
}
AUTOENCODER_OTHER: dict[str, Any] = {
    **{"latent_channels": 3, "layers_per_block": 2, "norm_num_groups": 2, "mid_block_add_attention": False},
    **{"scaling_factor": 3.0, "shift_factor": 0.5},
}
LDM_OTHER = {"block_out_channels": [8, 16], "layers_per_block": 2, "head_size": 4, "norm_num_groups": 2}
SINCOS, STRETCHED = {"position_embedding": "sincos_2d"}, {"rope_factors": [1.0, 4.0, 1.0]}
UNUSED_TEXT = r"layers\.1\.text\.(q_layernorm|linear_proj|mlp)\..*"
"""Parameters of a last block whose text output is unused."""


def axes(features: list[int], default: Optional[list[int]], **more: Any) -> dict[str, Any]:
    """Return `also` for `rope_axes`: `features` for heads of another size; the default for positions that ignore it."""
    sizes = {name: {"rope_axes": features} for name in ("hidden_size", "num_attention_heads")}
    return {**sizes, "position_embedding": {"rope_axes": default}, **more}


def joint(features: list[int], default: list[int]) -> dict[str, Any]:
    """Return settings of a row with joint attention: a dropped text keeps its length, a missing one is one token."""
    crop = {"position_crop": {**SINCOS, "rope_axes": default}}
    return {"also": axes(features, default), "requires": crop, "text_tokens": 1}


JOINT = joint([4, 8, 4], [16, 56, 56])
BACKBONES = {
    "dit": Row(recipe="tiny_dit", other={**SINCOS, "rope_axes": [2, 4, 2]}),
    "jit": Row(
        recipe="jit_b16_imagenet",
        quick=("cp2",),
        refused=("routing", "num_experts", "wide_head", "value_residual"),
        other={"patch_spatial": 8, "rope_factors": [1.0, 4.0, 1.0]},
        requires={name: {**needs, "class_tokens": None} for name, needs in REQUIRES.items() if "moe" in name},
        also=axes([4, 8, 4], None, num_layers={"class_tokens": [3, 2]}),
    ),
    "rit": Row(
        recipe="rit_xl_imagenet",
        refused=("routing", "num_experts", "wide_head", "value_residual", *MOE),
        other=STRETCHED,
        requires={name: {} for name in MOE},
        also=axes([4, 8, 4], None, num_layers={"class_tokens": [3, 2]}),
        objective=FlowMatching(prediction="x0", teacher_token_weight=0.2),
    ),
    "reg": Row(
        recipe="tiny_reg",
        refused=("num_experts", "wide_head", *MOE),
        other={**SINCOS, "rope_axes": [2, 4, 2]},
        requires={name: {} for name in MOE},
        objective=FlowMatching(teacher_token_weight=0.2),
    ),
    "sr_dit": Row(
        recipe="sr_dit_b1_imagenet",
        refused=("class_tokens", "num_experts", "wide_head", *MOE),
        other=STRETCHED,
        requires={name: {} for name in MOE},
        also=axes([4, 8, 4], None),
        objective=FlowMatching(teacher_token_weight=0.2),
    ),
    "wide head": Row(
        recipe="dit_dh_xl_imagenet",
        quick=("tp2_sp", "pp2"),
        refused=("class_tokens", "num_experts", "teacher_token_size"),
        other=STRETCHED,
        requires={name: {**needs, "wide_head": None} for name, needs in REQUIRES.items() if "moe" in name},
        also=axes([4, 8, 4], None),
    ),
    "dit_cross": Row(recipe="pretrain_7b", other=SINCOS),
    "tread": Row(recipe="tests.laws.options.tread_cross", quick=("cp2",), other=SINCOS),
    "sprint": Row(
        recipe="tests.laws.options.sprint_dit",
        quick=("pp2",),
        other={**SINCOS, "rope_axes": [2, 4, 2]},
        refused=("class_tokens",),
    ),
    "stdit": Row(
        recipe="pretrain_stdit_xl",
        quick=("cp2",),
        other={"layer_pattern": ["spatial", "full"], "position_span": 8.0},
        # Temporal attention has rotary positions by default.
        requires={"rope_theta": {}, "rope_factors": {}, "rope_scaling": {"rope_factors": [2.0, 1.0, 1.0]}},
    ),
    "moviegen": Row(recipe="pretrain_ditllama5b", **LEARNED_POSITIONS),
    "experts": Row(recipe="pretrain_ecditllama1b", quick=("tp2_sp",), **LEARNED_POSITIONS),
    "flux": Row(
        recipe="flux_12b",
        quick=("fsdp2_bf16",),
        other=STRETCHED,  # only one feature pair rotates with t; NTK does not change it
        refused=("num_query_groups",),
        **JOINT,
    ),
    "flux of control pictures": Row(
        recipe="tests.laws.options.flux_control",
        quick=("tp2_sp",),
        other=STRETCHED,
        refused=("num_query_groups",),
        **JOINT,
    ),
    "chroma": Row(
        recipe="finetune_chroma",
        quick=("pp2",),
        other={**STRETCHED, "null_text": "learned"},
        refused=("num_query_groups", "num_dual_layers", "guidance", "pooled_size"),
        **JOINT,
    ),
    "flux2": Row(
        recipe="flux2_32b",
        quick=("tp2_sp",),
        other={**STRETCHED, "rope_axes": [4, 2, 2, 0]},
        # With one pair of features for each axis, theta has no effect.
        requires={name: TWO_PAIRS for name in ("rope_theta", "rope_factors")}
        | {"rope_scaling": {**TWO_PAIRS, "rope_factors": [2.0, 3.0, 2.0]}}
        | {"position_crop": {**SINCOS, "rope_axes": [32, 32, 32, 32]}},
        refused=("num_dual_layers", "num_query_groups"),  # its blocks share modulations
        also=axes([4, 4, 4, 4], [32, 32, 32, 32]),
        text_tokens=1,
    ),
    "qwen_image": Row(
        recipe="qwen_image_1024",
        quick=("pp2",),
        other=STRETCHED,
        refused=("num_query_groups",),
        idle=UNUSED_TEXT,
        **JOINT,
    ),
    "sd3": Row(
        recipe="sd3_5_medium_1024",
        quick=("tp2_sp",),
        other={"rope_factors": [1.0, 1.0, 4.0]},
        refused=("num_query_groups", "num_single_layers"),  # single blocks read the text of the last joint block
        requires={
            **{name: SD3_ROTARY for name in ("rope_axes", "rope_theta", "rope_factors")},
            "rope_scaling": {**SD3_ROTARY, "rope_factors": [1.0, 3.0, 1.0]},
        },
        text_tokens=1,
        idle=r"layers\.1\.text\.q_layernorm\..*",  # last block: unused text queries
    ),
    "sana": Row(
        recipe="tiny_sana",
        quick=("cp2",),
        other={"num_cross_attention_heads": 4, **SINCOS},
        refused=("num_query_groups", "rope_theta", "rope_factors", "rope_scaling"),
        requires={"rope_theta": {}, "rope_factors": {}, "rope_scaling": {}},
    ),
    "prx": Row(
        recipe="tiny_prx",
        quick=("tp2_sp",),
        other=STRETCHED,
        also=axes([4, 8, 4], [0, 32, 32]),
        text_tokens=1,
    ),
    "prx of diffusers": Row(
        recipe="prx_512",
        quick=("pp2",),
        other={**STRETCHED, "null_text": "learned"},
        also=axes([0, 8, 8], [0, 32, 32]),
        requires={"rope_scaling": {"rope_factors": [1.0, 3.0, 2.0]}},
        text_tokens=1,
    ),
    "lumina2": Row(
        recipe="lumina2_1024",
        quick=("pp2",),
        refused=("num_dual_layers",),
        other=STRETCHED,
        **joint([4, 8, 4], [32, 32, 32]),
    ),
    "z_image": Row(
        recipe="z_image_1024",
        quick=("cp2",),
        refused=("num_dual_layers",),
        other=STRETCHED,
        **joint([4, 8, 4], [32, 48, 48]),
    ),
    "hunyuan_video": Row(
        recipe="tiny_hunyuan_video",
        quick=("tp2_sp",),
        other={
            **{**STRETCHED, "num_refiner_layers": 1, "glyph_size": 14, "glyph_hidden_size": 24},
            **{"image_context_size": 9, "image_to_video": False},
        },
        refused=("num_query_groups",),
        idle=UNUSED_TEXT,
        **JOINT,
    ),
    "wan": Row(recipe="wan_14b_mock"),
    "ddpm_unet": Row(
        recipe="tiny_ddpm_unet",
        quick=("fsdp2",),
        other={"block_out_channels": [8, 16], "mid_out_channels": [24, 8]},
        objective=DDPM(discrete_steps=1000),
    ),
    "edm2_unet": Row(
        recipe="tiny_edm2",
        quick=("distributed2",),
        other={"block_out_channels": [8, 16], "layers_per_block": 2, "attention_levels": [0, 1], "head_size": 4},
        objective=EDM(),
    ),
    "ldm_unet": Row(
        recipe="tiny_ldm_unet",
        other={**LDM_OTHER, "transformer_layers": [2, 1], "mid_transformer_layers": 0, "null_text": "empty"},
        objective=DDPM(schedule="scaled_linear", discrete_steps=1000),
    ),
    "sdxl_unet": Row(
        recipe="tiny_sdxl_unet",
        other={**LDM_OTHER, "transformer_layers": [1, 1], "mid_transformer_layers": 1, "null_text": "learned"},
        without_effect={"num_attention_heads": "head_size replaces it"},
        objective=DDPM(schedule="scaled_linear", discrete_steps=1000),
    ),
    "imagen": Row(recipe="imagen_400m_res_256", other={**IMAGEN_OTHER, "condition_size": 24, "dropout": 0.5}, **IMAGEN),
    "efficient_unet": Row(recipe="imagen_600m_res_256", other=IMAGEN_OTHER, **IMAGEN),
    "trial_unet": Row(recipe="tests.laws.trial_unet.trial_unet", other={"norm_groups": 2}),
    "autoencoder": Row(
        recipe="pictogram_autoencoder",
        other={**AUTOENCODER_OTHER, "patch_spatial": 4, "block_out_channels": [8, 16, 8, 24], "codebook_size": 16},
        also={"patch_spatial": {"block_out_channels": [8, 8, 8]}},
        refused=("patch_temporal",),
        without_effect=dict.fromkeys(("scaling_factor", "shift_factor"), "other models scale its latents"),
        objective=Autoencoding(kl_weight=0.1),
    ),
    "vq_autoencoder": Row(
        recipe="pictogram_vq_autoencoder",
        quick=("dp2",),
        other={**AUTOENCODER_OTHER, "patch_spatial": 2, "block_out_channels": [8, 16, 24], "codebook_size": 7},
        also={"patch_spatial": {"block_out_channels": [8, 8]}},
        refused=("patch_temporal", "shift_factor"),
        without_effect={"scaling_factor": "other models scale its latents"},
        objective=VQAutoencoding(),
    ),
}
NAMES = list(BACKBONES)
ALWAYS_GIVEN = ("chroma", "prx of diffusers")  # dropped texts are replaced by the empty text
CONDITIONED = [name for name in NAMES if "autoencoder" not in name and name not in ALWAYS_GIVEN]


@cache
def run_of(name: str) -> RunConfig:
    return built(call_recipe(BACKBONES[name].recipe))


@cache
def config_of(name: str) -> ModelConfig:
    return tiny_model(run_of(name).model, ParallelConfig())


def pack(
    config: ModelConfig, numbers: list[int], *, multiple_of: int = 1, tail: int = 0, text_tokens: int = 5
) -> PackedBatch:
    """Return a pack of synthetic samples with padding after each."""
    return MockPacks(config, text_tokens)(numbers, multiple_of=multiple_of, tail=tail)
