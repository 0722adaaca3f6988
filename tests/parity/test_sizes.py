"""Sizes: published numbers of parameters, FLOP counts from the config, and errors for impossible sizes."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import fiddle
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    Lumina2Transformer2DModel,
    PRXTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    VQModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.convert.diffusers_autoencoder import DiffusersAutoencoder, DiffusersVQModel
from dit.convert.diffusers_format import format_of_settings
from dit.errors import ConfigError
from dit.layers.embeddings import CONDITION_FEATURES
from dit.layout import SequenceLayout
from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.base import ModelConfig
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.edm2_unet.config import EDM2UNetConfig
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.models.prx.config import PRXConfig
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.wan.config import WanConfig
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters, parameter_shapes
from launch.config_file import built
from launch.train import call_recipe
from recipes.models import dit_dh_xl, dit_xl, lightningdit_xl, rit_xl, sdxl_unet, sr_dit_b1
from tests.conftest import BuildModel
from tests.parity.test_formulas import small
from tests.support.batches import MIXED, STRETCH, draw, pack

SMALL: dict[str, Any] = {
    **{"hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "in_channels": 4, "num_classes": 5},
    **{"context_size": 10, "position_embedding": "rope_3d", "rope_factors": STRETCH},
}
BASES: dict[str, Any] = {
    "dit": DiTConfig(hidden_size=48, num_layers=2, num_attention_heads=4, in_channels=4, num_classes=5),
    "dit_cross": DiTCrossConfig(**SMALL),
    "moviegen": MovieGenConfig(**SMALL, num_query_groups=4, ffn_hidden_size=96),
    "stdit": STDiTConfig(**{**SMALL, "in_channels": STDiTConfig.in_channels}),
    "flux": small("flux"),
    "wan": small("wan"),
    "sana": small("sana"),
    "prx": PRXConfig(),
}


def cross(layers: int, heads: int, hidden_size: int, **changes: Any) -> DiTCrossConfig:
    return DiTCrossConfig(hidden_size=hidden_size, num_layers=layers, num_attention_heads=heads, **changes)


def movie(layers: int, heads: int, hidden_size: int, **changes: Any) -> MovieGenConfig:
    return MovieGenConfig(hidden_size=hidden_size, num_layers=layers, num_attention_heads=heads, **changes)


def segments(pairs: int, heads: int, hidden_size: int, **changes: Any) -> STDiTConfig:
    return STDiTConfig(hidden_size=hidden_size, num_layers=2 * pairs, num_attention_heads=heads, **changes)


def of_classes(layers: int, heads: int, hidden_size: int) -> DiTConfig:
    sizes = {"hidden_size": hidden_size, "num_layers": layers, "num_attention_heads": heads}
    return DiTConfig(**sizes, in_channels=4, out_channels=8, num_classes=1000)


def model_of(recipe: str) -> Any:
    return built(call_recipe(recipe)).model


def edm2(width: int) -> EDM2UNetConfig:
    """Return a model of 1000 classes; the unconditional case is one of them."""
    return EDM2UNetConfig(num_classes=999, block_out_channels=[width, 2 * width, 3 * width, 4 * width])


EC_1B = {"num_experts": 64, "moe_ffn_hidden_size": 1024, "moe_capacity_factor": 8.0}
JIT_B16 = DiTConfig(
    **{"in_channels": 3, "patch_spatial": 16, "hidden_size": 768, "num_attention_heads": 12, "ffn_hidden_size": 2048},
    **{"bottleneck_size": 128, "class_tokens": [32, 4], "activation": "swiglu", "rms_norm": True, "qk_layernorm": True},
    num_classes=1000,
)
IMAGEN: list[tuple[str, dict[str, Any], int]] = [
    ("imagen_500m_res_64", {}, 524_897_540),
    ("imagen_2b_res_64", {}, 2_171_162_116),
    ("imagen_400m_res_256", {}, 408_350_468),
    ("imagen_500m_res_64", {"context_size": 512}, 524_371_716),
    ("imagen_2b_res_64", {"condition_size": 512}, 2_059_415_044),
    ("imagen_400m_res_256_doc429m", {}, 428_948_228),
    ("imagen_450m_res_256_stacked", {}, 568_675_844),
    ("imagen_600m_res_256", {}, 646_023_428),
    ("imagen_600m_res_256", {"noise_augmentation": False, "attention_type": "self"}, 638_332_164),
    ("imagen_600m_res_256_stacked", {}, 700_281_604),
    ("imagen_600m_res_1024", {}, 639_193_348),
    ("imagen_400m_res_1024", {}, 287_789_828),
    ("imagen_400m_res_1024_doc427m", {}, 427_050_500),
]
"""Recipes of Imagen's UNets, changes of their models, and published numbers of parameters."""
NAMED: dict[str, tuple[Any, float]] = {
    # The published code has a frozen table of 16 x 16 positions, which we compute instead.
    "DiT-S/2": (of_classes(12, 6, 384), 32_963_360 - 256 * 384),
    "DiT-B/2": (of_classes(12, 12, 768), 130_512_416 - 256 * 768),
    "DiT-L/2": (of_classes(24, 16, 1024), 458_102_816 - 256 * 1024),
    "DiT-XL/2": (of_classes(28, 16, 1152), 675_129_632 - 256 * 1152),
    # Weights of NeMo's configurations. Ours are larger by the modulated head (2 h^2) and by a frame-rate embedder of
    # the full width (h^2 more than NeMo's padded embedder).
    "DiT-S": (cross(12, 6, 384), 50.6e6),
    "DiT-B": (cross(12, 12, 768), 183.1e6),
    "DiT-L": (cross(24, 16, 1024), 631.5e6),
    "DiT-XL": (cross(28, 16, 1152), 923.7e6),
    "DiT-XL low rank": (cross(28, 16, 1152, adaln_lora_rank=256), 671.8e6),
    "DiT-7B": (cross(32, 24, 3072), 7166.5e6),
    "DiT-28B": (cross(32, 48, 6144), 28.2e9),
    "MovieGen-1B": (MovieGenConfig(), 1.54e9),
    "MovieGen-3B": (movie(28, 24, 3072), 5.01e9),
    "MovieGen-5B": (movie(32, 24, 3072), 5.72e9),
    "MovieGen-30B": (movie(48, 48, 6144, ffn_hidden_size=16384), 33.4e9),
    "EC-DiT-1B": (MovieGenConfig(**EC_1B), 7.18e9),
    # The published counts are of pairs of a spatial and a temporal layer, with 16 h^2 weights per layer.
    "ST-DiT-S": (segments(12, 6, 384), 58.7e6),
    "ST-DiT-XL": (segments(28, 16, 1152), 1.2e9),
    "ST-DiT-3B": (segments(24, 16, 2048, ffn_hidden_size=8192), 3.25e9),
    "ST-DiT-3B Open-Sora": (segments(28, 26, 1872), 3.17e9),
    "JiT-B/16": (JIT_B16, 131e6),
    "SiT-XL/2": (fiddle.build(dit_xl()), 675e6),
    "LightningDiT-XL": (fiddle.build(lightningdit_xl()), 675e6),
    # The published 140 M include the projection of REPA, which has 7.3 M.
    "SR-DiT-B/1": (fiddle.build(sr_dit_b1()), 140e6 - 7.3e6),
    "RiT-XL": (fiddle.build(rit_xl()), 676e6),
    # The published head has narrower MLPs.
    "DiT-DH-XL": (fiddle.build(dit_dh_xl()), 839e6),
    # Karras et al. 2024 (EDM2), table 2.
    "EDM2-XS": (edm2(128), 125e6),
    "EDM2-L": (edm2(320), 777e6),
    "EDM2-XXL": (edm2(448), 1523e6),
    "DDPM CIFAR-10": (DDPMUNetConfig(), 15_664_771),
    "DDPM CIFAR-10 wide": (DDPMUNetConfig(mid_out_channels=[512, 512, 256]), 23_335_555),
    "DDPM fonts": (DDPMUNetConfig(in_channels=1, num_classes=26), 15_667_585),
    **{f"{name} {changes}": (replace(model_of(name), **changes), count) for name, changes, count in IMAGEN},
}
"""Our config, and the published number of parameters: exact, or rounded if it is a float."""
SD_1_5: dict[str, Any] = {  # unet/config.json of runwayml/stable-diffusion-v1-5
    **{"_class_name": "UNet2DConditionModel", "act_fn": "silu", "attention_head_dim": 8, "sample_size": 64},
    **{"block_out_channels": [320, 640, 1280, 1280], "center_input_sample": False, "cross_attention_dim": 768},
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    **{"downsample_padding": 1, "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 4, "out_channels": 4},
    **{"layers_per_block": 2, "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32},
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
}
SDXL: dict[str, Any] = {  # unet/config.json of stabilityai/stable-diffusion-xl-base-1.0
    **{"_class_name": "UNet2DConditionModel", "act_fn": "silu", "attention_head_dim": [5, 10, 20]},
    **{"addition_embed_type": "text_time", "addition_embed_type_num_heads": 64, "addition_time_embed_dim": 256},
    **{"block_out_channels": [320, 640, 1280], "center_input_sample": False, "cross_attention_dim": 2048},
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    **{"downsample_padding": 1, "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 4, "out_channels": 4},
    **{"layers_per_block": 2, "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32},
    **{"num_attention_heads": None, "projection_class_embeddings_input_dim": 2816, "sample_size": 128},
    **{"transformer_layers_per_block": [1, 2, 10], "upcast_attention": None, "use_linear_projection": True},
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
}
KL_F8 = AutoencoderConfig(scaling_factor=0.18215)
VQ_F4 = AutoencoderConfig(
    patch_spatial=4, latent_channels=3, block_out_channels=[128, 256, 512], codebook_size=8192, scaling_factor=2.0
)
SD3_5: dict[str, Any] = {"qk_norm": "rms_norm", "sample_size": 128}
PUBLISHED: dict[str, tuple[Any, dict[str, Any], float]] = {
    "FLUX.1-dev": (FluxTransformer2DModel, {"guidance_embeds": True}, 11_901_408_320),
    "FLUX.1-schnell": (FluxTransformer2DModel, {}, 11_891_178_560),
    "FLUX.2 dev": (Flux2Transformer2DModel, {}, 32.22e9),
    "FLUX.2 klein 9B": (
        Flux2Transformer2DModel,
        {"num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288, "guidance_embeds": False},
        9.08e9,
    ),
    "FLUX.2 klein 4B": (
        Flux2Transformer2DModel,
        {
            **{"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680},
            "guidance_embeds": False,
        },
        3.88e9,
    ),
    "Chroma": (ChromaTransformer2DModel, {}, 8_899_983_424),
    "Qwen-Image": (QwenImageTransformer2DModel, {}, 20.43e9),
    "Lumina-Image 2.0": (Lumina2Transformer2DModel, {"cap_feat_dim": 2304}, 2.61e9),
    "Z-Image": (ZImageTransformer2DModel, {}, 6.15e9),
    "PRX": (PRXTransformer2DModel, {}, 1_170_691_648),
    "SANA 1.6B": (SanaTransformer2DModel, {}, 1_604_462_752),
    "HunyuanVideo 1.5": (HunyuanVideo15Transformer3DModel, {}, 8.33e9),
    "Stable Diffusion 3.5 large": (
        SD3Transformer2DModel,
        {
            **{**SD3_5, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432},
            "pos_embed_max_size": 192,
        },
        8.06e9,
    ),
    "Stable Diffusion 3.5 medium": (
        SD3Transformer2DModel,
        {
            **{**SD3_5, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536},
            **{"pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13))},
        },
        2.24e9,
    ),
    "Wan 2.1 1.3B": (
        WanTransformer3DModel,
        {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        1_418_996_800,
    ),
    "Wan 2.1 14B": (WanTransformer3DModel, {}, 14_288_491_584),
    "Wan 2.2 TI2V 5B": (
        WanTransformer3DModel,
        {"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336, "num_layers": 30},
        5.0e9,
    ),
    "Stable Diffusion 1.5": (UNet2DConditionModel, SD_1_5, 859_520_964),
    "Stable Diffusion XL": (UNet2DConditionModel, SDXL, 2_567_463_684),
    "KL-f8": (AutoencoderKL, DiffusersAutoencoder().write_settings(KL_F8, (1, 256, 256))[0], 83_653_863),
    "VQ-f4": (VQModel, DiffusersVQModel().write_settings(VQ_F4, (1, 256, 256))[0], 55_322_782),
}
"""Class of diffusers, the settings that differ from its defaults, and the number of parameters as in `NAMED`."""
DISTILLED = ("FLUX.1-dev", "FLUX.1-schnell", "FLUX.2 dev")
OURS: dict[str, ModelConfig] = {
    "SANA 1.6B": SanaConfig(null_text="empty"),
    "PRX": PRXConfig(null_text="empty"),
    "HunyuanVideo 1.5": HunyuanVideoConfig(ffn_hidden_size=8192, image_to_video=True, null_text="empty"),
    "Wan 2.2 TI2V 5B": replace(
        model_of("wan_2_2_ti2v_5b_mock"), context_dropout=WanConfig.context_dropout, null_text="empty"
    ),
    "Stable Diffusion 1.5": LDMUNetConfig(null_text="empty"),
    "Stable Diffusion XL": fiddle.build(sdxl_unet()),
    "KL-f8": KL_F8,
    "VQ-f4": VQ_F4,
}
"""Our configs and recipes of published networks."""


@pytest.mark.usefixtures("one_rank_world")
@pytest.mark.parametrize("name", NAMED)
def test_named_sizes_have_their_parameters(name: str) -> None:
    config, published = NAMED[name]
    assert count_parameters(config) == pytest.approx(published, rel=0.01 if isinstance(published, float) else 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_networks_have_their_parameters(name: str) -> None:
    """Names and shapes are those of diffusers.

    A learned null token is additional: networks with distilled guidance do not replace dropped texts by an empty text.
    """
    external, settings, count = PUBLISHED[name]
    form = format_of_settings({"_class_name": external.__name__})
    imported = form.read_settings(settings)
    assert OURS.get(name, imported.model) == imported.model
    assert (getattr(imported.model, "null_text", None) == "learned") == (name in DISTILLED)
    with torch.device("meta"):
        published = {key: tuple(p.shape) for key, p in external.from_config(settings).named_parameters()}
        rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    assert rules.external_shapes() == published
    parameters = sum(map(math.prod, published.values()))
    assert parameters == pytest.approx(count, rel=3e-3 if isinstance(count, float) else 0)


COUNTED: dict[str, tuple[str, dict[str, Any]]] = {
    "low_rank": ("dit_cross", {"adaln_lora_rank": 6, "size_conditioning": True}),
    "grouped": ("moviegen", {"num_query_groups": 2}),
    "experts": ("moviegen", {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_capacity_factor": 1.5}),
    "top_k": ("moviegen", {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router": "top_k", "moe_top_k": 3}),
    "all_in_one": ("stdit", {"layer_pattern": ["spatial+full+temporal"], "num_query_groups": 2}),
    "pixart": (
        "stdit",
        {"layer_pattern": ["full"], "size_conditioning": True, "add_bias": False, "ffn_hidden_size": 100},
    ),
    "guidance": ("flux", {"guidance": 3.5}),
    "wan_grouped": ("wan", {"num_query_groups": 2, "size_conditioning": True}),
    "sana_1.5": ("sana", {"qk_layernorm": True, "size_conditioning": True}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_flops_equal_those_of_torch(build_model: BuildModel, name: str) -> None:
    """Counts are exact; the training count excludes gradients of the inputs, which are not needed.

    `tests/laws` counts the forward pass of every backbone.
    """
    backbone, changes = COUNTED[name]
    config = replace(BASES[backbone], **changes)
    model, batch = build_model(config, perturb=0.1), pack(MIXED, config, multiple_of=8)
    inputs, time = draw(batch)
    # The counter sees the matrix products of the math backend, but not CPU flash attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(inputs, time, batch)
        forward = counter.get_total_flops()
        out.sum().backward()
    shape, flops = (batch.layout, batch.grids, batch.conditions.layout("context")), PackFlops(config)
    assert forward == flops.forward(*shape, convention="hardware")
    if backbone == "sana":  # the backward pass of its convolution does not cost two forward passes
        return
    numbers = 1 + (getattr(config, "guidance", None) is not None) + getattr(config, "fps_conditioning", False)
    numbers += 3 * getattr(config, "size_conditioning", False)
    unneeded = len(inputs) * config.token_channels + batch.layout.num_samples * CONDITION_FEATURES * numbers
    exact = flops.training(*shape, convention="hardware") - 2 * unneeded * config.hidden_size
    assert counter.get_total_flops() == exact


def test_recompute_of_every_block_adds_the_blocks() -> None:
    """Recomputing every block adds exactly one forward pass of the blocks."""
    config, batch = BASES["flux"], pack(MIXED, BASES["flux"])
    shape, flops = (batch.layout, batch.grids, batch.conditions["context"].layout), PackFlops(config)
    more = replace(config, num_joint_layers=2 * config.num_joint_layers, num_single_layers=2 * config.num_single_layers)
    blocks = PackFlops(more).forward(*shape) - flops.forward(*shape)
    twice, once = (flops.training(*shape, convention="hardware", recomputed=share) for share in (1.0, 0.0))
    assert twice == once + blocks


def test_the_convention_of_published_tables_ignores_grids() -> None:
    layout, flops = SequenceLayout.from_lengths([8]), PackFlops(BASES["stdit"])
    clip, line = (flops.forward(layout, [grid], convention="nemo") for grid in ((2, 2, 2), (1, 1, 8)))
    assert clip == line


CROSS: list[tuple[dict[str, Any], list[str]]] = [
    ({"hidden_size": 50}, ["hidden_size=50", "num_attention_heads=4"]),
    ({"num_query_groups": 3}, ["num_attention_heads=4", "num_query_groups=3", "[1, 2, 4]"]),
    ({"context_size": None}, ["context_size=None"]),
    ({"position_embedding": "rope"}, ["position_embedding='rope'"]),
    ({"num_attention_heads": 12}, ["4 features", "rope_3d"]),
    ({"rope_factors": [1.0, 2.0]}, ["rope_factors=[1.0, 2.0]"]),
    ({"rope_theta": 1.0}, ["rope_theta=1.0"]),
    ({"rope_scaling": "yarn"}, ["rope_scaling='yarn'"]),
    ({"rope_factors": [1.0, 1.0, 1.0], "rope_scaling": "linear"}, ["rope_scaling=linear has no effect without"]),
]
"""Changes of `moviegen` that the config of all transformers refuses, and parts of the error message."""
FIXED_POSITIONS = {"position_embedding": "sincos_3d", "rope_factors": None}
REFUSED: dict[str, list[tuple[dict[str, Any], list[str]]]] = {
    "dit": [
        ({"hidden_size": 6, "num_attention_heads": 2}, ["hidden_size=6", "sincos_2d"]),
        ({"num_experts": 4, "moe_router": "sinkhorn"}, ["moe_router='sinkhorn'", "'expert_choice'", "'top_k'"]),
        ({"num_experts": 4, "moe_capacity_factor": 5.0}, ["moe_capacity_factor=5.0", "num_experts=4"]),
        ({"num_experts": 4, "moe_router": "top_k", "moe_top_k": 5}, ["moe_top_k=5", "at most 4"]),
        (
            {"num_experts": 4, "moe_top_k": 1},
            ["moe_top_k=1 has no effect", "moe_router=top_k", "leave model.moe_top_k=2"],
        ),
        ({"num_experts": 4, "moe_aux_loss_coeff": 0.0}, ["moe_aux_loss_coeff=0.0 has no effect"]),
        (
            {"num_experts": 4, "moe_router": "top_k", "moe_capacity_factor": 1.5},
            ["moe_capacity_factor=1.5 has no effect", "moe_router=expert_choice"],
        ),
    ],
    "moviegen": [
        *(
            (
                {"position_embedding": kind, "rope_factors": None, "max_grid": [4, 5, 6]},
                ["max_grid=[4, 5, 6] has no effect", "leave model.max_grid=[128, 120, 120]"],
            )
            for kind in ("rope_3d", "sincos_3d")
        ),
        *(({"max_grid": grid}, ["max_grid"]) for grid in ([4, 4], [0, 4, 4])),
    ],
    "flux": [
        ({"ffn_hidden_size": 41}, ["ffn_hidden_size=41", "num_attention_heads=4", "use 40"]),
        ({"rope_axes": [2, 4, 4]}, ["add up to 10", "12"]),
        ({"rope_axes": [3, 4, 5]}, ["[3, 4, 5]", "even"]),
        ({"rope_axes": [6, 6]}, ["[6, 6]", "3 even", "t, h, w"]),
        (
            {"position_embedding": "sincos_3d"},
            ["rope_axes=[2, 6, 4] has no effect", "leave model.rope_axes=[16, 56, 56]"],
        ),
        ({"position_embedding": "learned_3d"}, ["position_embedding='learned_3d'", "'rope_3d'", "'sincos_3d'"]),
    ],
    "wan": [
        ({"rope_theta": 50.0, "position_embedding": "sincos_3d"}, ["rope_theta=50.0 has no effect", "use 'rope_3d'"]),
        ({"position_embedding": "sincos_2d"}, ["position_embedding='sincos_2d'", "'rope_3d', 'sincos_3d'"]),
        ({"hidden_size": 42, "num_attention_heads": 6, "position_embedding": "sincos_3d"}, ["hidden_size=42"]),
    ],
    "sana": [
        ({"num_query_groups": 2}, ["num_query_groups=2", "use None"]),
        ({"num_cross_attention_heads": 5}, ["hidden_size=24", "num_cross_attention_heads=5", "1, 2, 3, 4, 6, 8, 12"]),
        ({"position_embedding": "rope_3d"}, ["position_embedding='rope_3d'", "'none', 'sincos_2d', 'sincos_3d'"]),
    ],
    "prx": [
        ({"context_size": None}, ["PRXConfig attends to text"]),
    ],
    "stdit": [
        ({"layer_pattern": []}, ["layer_pattern=[]"]),
        ({"num_layers": 3}, ["num_layers=3", "2 layers"]),
        ({"layer_pattern": ["spatial", "time"]}, ["'time'", "temporal"]),
        ({"layer_pattern": ["full+full"]}, ["'full+full'"]),
        ({"layer_pattern": ["spatial", "full+temporal"]}, ["[1, 2]", "same number"]),
        ({"position_span": 8.0, "position_embedding": "rope_3d"}, ["position_span=8.0", "rope_3d"]),
        ({"num_attention_heads": 16}, ["3 features", "layer_pattern"]),
        ({"rope_theta": 50.0, "layer_pattern": ["full"]}, ["rope_theta=50.0 has no effect", "'sincos_2d'"]),
        ({"rope_factors": [2.0, 1.5, 1.0]}, ["rope_factors=[2.0, 1.5, 1.0] has no effect along h and w"]),
    ],
}


def refused() -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    yield from (("moviegen", *case) for case in CROSS)
    for setting, value in (("rope_theta", 50.0), ("rope_factors", [2.0, 1.0, 1.0]), ("rope_scaling", "linear")):
        yield "moviegen", {**FIXED_POSITIONS, setting: value}, [f"model.{setting}={value} has no effect with"]
    yield from ((name, *case) for name, cases in REFUSED.items() for case in cases)


@pytest.mark.parametrize(("name", "changes", "said"), refused(), ids=lambda value: ",".join(map(str, value))[:40])
def test_impossible_sizes_are_named_with_their_numbers(name: str, changes: dict, said: list[str]) -> None:
    base = small(name) if name == "stdit" else BASES[name]
    base.validate()
    with pytest.raises(ConfigError) as caught:
        replace(base, **changes).validate()
    assert all(text in str(caught.value) for text in said)


def test_settings_of_positions_that_are_used_are_valid() -> None:
    replace(small("stdit"), rope_theta=50.0, rope_scaling="linear", rope_factors=[2.0, 1.0, 1.0]).validate()
    for name in ("dit_cross", "moviegen"):
        replace(BASES[name], **FIXED_POSITIONS).validate()
