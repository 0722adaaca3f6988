"""Settings of networks in diffusers: refusals both ways, widths, old folders, and pictures that are not square."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

from dit.convert.diffusers_autoencoder import DiffusersAutoencoder, DiffusersVQModel
from dit.convert.diffusers_cross import DiffusersPixArt, DiffusersSana
from dit.convert.diffusers_dit import DiffusersDiT
from dit.convert.diffusers_format import DiffusersFormat, format_of_model, format_of_settings
from dit.convert.diffusers_hunyuan_video import DiffusersHunyuanVideo
from dit.convert.diffusers_unet import DiffusersUNet
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.flux.config import FluxConfig
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.models.prx.config import PRXConfig
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.streams.families import Flux2Config, SD3Config, ZImageConfig
from dit.models.wan.config import WanConfig
from dit.parallel.build import parameter_shapes
from dit.verify.public import CALLS
from tests.conftest import BuildModel
from tests.parity import (
    test_convert_autoencoder,
    test_convert_dit,
    test_convert_unet,
    test_convert_vq_autoencoder,
    test_hunyuan_video,
)
from tests.parity.convert_cases import load, random_weights, relative_error, run
from tests.parity.test_convert_streams import FAMILIES

RTOL = 1e-5
PIXART_MODEL = {"layer_pattern": ["full"], "qk_layernorm": False, "fps_conditioning": False}
UNET = test_convert_unet.SIZES["v1"]
FORMS: dict[str, tuple[DiffusersFormat[Any], Any]] = {
    **{
        name: (FAMILIES[name].form, FAMILIES[name].small)
        for name in ("flux_schnell", "flux2_dev", "chroma", "pixart", "sana", "wan")
    },
    "dit": (DiffusersDiT(), test_convert_dit.diffusers_model),
    "hunyuan_video": (DiffusersHunyuanVideo(), test_hunyuan_video.small),
    "unet": (DiffusersUNet(), lambda: test_convert_unet.diffusers_model(UNET)),
    "autoencoder": (
        DiffusersAutoencoder(),
        lambda: AutoencoderKL(**test_convert_autoencoder.SIZES["flat"]),
    ),
    "vq_autoencoder": (DiffusersVQModel(), lambda: test_convert_vq_autoencoder.public("flat")[0]),
}
"""Form of a class of diffusers, and a function that builds a small model of the class."""
UNSUPPORTED: dict[str, list[tuple[dict[str, Any], str]]] = {
    **{
        name: [
            ({"in_channels": 18}, "in_channels=18 is not a multiple of 4, the positions of a patch"),
            ({"out_channels": 6}, "out_channels=6 is not a multiple of 4, the positions of a patch"),
            ({"out_channels": 4}, "is above out_channels=4: this network also reads inputs"),
        ]
        for name in ("flux_schnell", "flux2_dev", "chroma")
    },
    "pixart": [
        ({"use_additional_conditions": True}, "use_additional_conditions=True"),
        ({"use_additional_conditions": None, "sample_size": 128}, "use_additional_conditions=True"),
        ({"cross_attention_dim": 24}, "cross_attention_dim=24"),
        ({"caption_channels": None}, "caption_channels=None"),
    ],
    "sana": [
        ({"interpolation_scale": 2}, "interpolation_scale=2"),
        ({"guidance_embeds": True}, "guidance_embeds=True"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm'"),
        ({"cross_attention_dim": 48}, "cross_attention_dim=48"),
        ({"cross_attention_head_dim": 4}, "cross_attention_head_dim=4"),
    ],
    "wan": [
        ({"image_dim": 1280}, "image_dim=1280"),
        ({"cross_attn_norm": False}, "cross_attn_norm=False"),
        ({"patch_size": (1, 2, 4)}, r"patch_size=\[1, 2, 4\]"),
    ],
    "dit": [
        ({"activation_fn": "geglu"}, r"activation_fn='geglu' \(only 'gelu-approximate'\)"),
        ({"cross_attention_dim": 512}, "unknown: cross_attention_dim=512"),
    ],
    "hunyuan_video": [
        ({"use_meanflow": True}, "use_meanflow=True"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm'"),
        ({"in_channels": 8}, r"in_channels=8 \(only 9\)"),
        ({"task_type": "sr"}, "task_type='sr' is not supported; use a model with"),
    ],
    "unet": [
        ({"use_linear_projection": True}, "use_linear_projection=True"),
        ({"addition_embed_type": "text_time"}, "addition_embed_type='text_time'"),
        ({"attention_head_dim": [2, 4, 8]}, r"head_dim=\[2, 4, 8\] \(only \["),
        ({"transformer_layers_per_block": [1, 2]}, r"per_block=\[1, 2\]: ours has one number for each of 3"),
        ({"out_channels": 8}, "out_channels=8 is above in_channels=4"),
        ({"layers_per_block": [1, 1, 1]}, r"layers_per_block=\[1, 1, 1\]: each must be one integer"),
        ({"attention_head_dim": None, "norm_num_groups": None}, "norm_num_groups=None, attention_head_dim=None: each"),
        ({"sample_size": None}, "sample_size=None: each must be one integer"),
        ({"sample_size": 64.0}, "sample_size=64.0: each must be one integer"),
        ({"up_block_types": ["CrossAttnUpBlock2D"] * 3}, "up_block_types="),
        ({"down_block_types": ["AttnDownBlock2D"] * 3}, "down_block_types="),
        ({"in_channels": 9}, "in_channels=9 are those of an inpainting model"),
        (
            {
                **{"addition_embed_type": "text_time", "addition_time_embed_dim": 256, "cross_attention_dim": 1280},
                "projection_class_embeddings_input_dim": 2560,
            },
            "input_dim=2560 is that of the refiner",
        ),
    ],
    "autoencoder": [
        ({"act_fn": "relu"}, "act_fn='relu'"),
        ({"use_quant_conv": False}, "use_quant_conv=False"),
        ({"latents_mean": (0.1, 0.2)}, "latents_mean="),
        ({"out_channels": 6}, r"out_channels=6 \(only 3\)"),
        ({"down_block_types": ("AttnDownEncoderBlock2D",) * 2}, "down_block_types="),
    ],
    "vq_autoencoder": [
        ({"norm_type": "spatial"}, "norm_type='spatial'"),
        ({"lookup_from_codebook": True}, "lookup_from_codebook=True"),
        ({"vq_embed_dim": 8}, "vq_embed_dim=8 and latent_channels=3"),
        ({"out_channels": 6}, r"out_channels=6 \(only 3\)"),
    ],
}
BEYOND: list[tuple[ModelConfig, list[dict[str, Any]]]] = [
    (
        FluxConfig(),
        [
            *({"patch_spatial": 1}, {"ffn_hidden_size": 96}, {"time_scale": 1.0}, {"rope_theta": 500.0}),
            *({"position_embedding": "sincos_3d"}, {"control_channels": 8}),
        ],
    ),
    (
        STDiTConfig(**PIXART_MODEL),
        [
            *({"layer_pattern": ["spatial", "temporal"]}, {"qk_layernorm": True}, {"fps_conditioning": True}),
            {"time_scale": 1.0},
        ],
    ),
    (
        SanaConfig(),
        [
            *({"fps_conditioning": True}, {"time_scale": 1.0}, {"position_embedding": "sincos_2d"}),
            {"layernorm_epsilon": 1e-5},
        ],
    ),
    (
        WanConfig(),
        [
            *({"qk_layernorm": False}, {"fps_conditioning": True}, {"num_query_groups": 4}, {"rope_theta": 500.0}),
            *({"time_scale": 1.0}, {"position_embedding": "sincos_3d"}),
        ],
    ),
    (
        Flux2Config(),
        [{"activation": "gelu_tanh"}, {"pooled_size": 5}, {"patch_spatial": 1}, {"time_scale": 1.0}],
    ),
    (HunyuanVideoConfig(), [{"out_channels": 64}]),
    (ZImageConfig(), [{"out_channels": 32}]),
    (
        PRXConfig(),
        [
            *({"out_channels": 8}, {"patch_temporal": 2}, {"layernorm_epsilon": 1e-5}, {"rope_axes": [16, 24, 24]}),
            {"rope_factors": [1.0, 2.0, 2.0]},
        ],
    ),
    (UNET, [{"mid_transformer_layers": 0}, {"transformer_layers": [1, 1, 2]}, {"patch_spatial": 2}]),
]
"""Models that diffusers supports, and changes that it does not."""


@pytest.mark.parametrize(("name", "change", "message"), [(n, *case) for n in UNSUPPORTED for case in UNSUPPORTED[n]])
def test_unsupported_settings_are_refused(name: str, change: dict, message: str) -> None:
    form, small = FORMS[name]
    with pytest.raises(ConfigError, match=message):
        form.read_settings({**small().config, **change})


@pytest.mark.parametrize(("model", "change"), [(model, x) for model, every in BEYOND for x in every], ids=str)
def test_a_model_without_a_diffusers_form_is_refused(model: ModelConfig, change: dict) -> None:
    with pytest.raises(ConfigError, match=f"does not support this model: .*{next(iter(change))}="):
        format_of_model(model).write_settings(replace(model, **change), (1, 8, 8))


def test_only_full_patches_of_the_size_of_stable_diffusion_3_matter() -> None:
    family = FAMILIES["sd3.5_medium"]
    external = family.small(sample_size=17)
    imported = family.form.read_settings(external.config)
    assert imported == family.form.read_settings(family.small(sample_size=16).config)
    rules = family.form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    assert {*rules.tables} <= external.state_dict().keys()
    rules.from_external(external.state_dict())


def test_a_wan_model_with_fewer_output_channels_has_settings() -> None:
    """An import of these settings is refused, because such a network reads other inputs, too."""
    model = WanConfig(out_channels=8)
    settings, _ = format_of_model(model).write_settings(model, (1, 8, 8))
    assert (settings["in_channels"], settings["out_channels"]) == (16, 8)


@pytest.mark.parametrize("ffn_size", [60, 61, 7])
def test_the_width_of_sanas_feed_forward_survives_a_round_trip(ffn_size: int) -> None:
    """`mlp_ratio` is a float, and its product with the width is rounded down."""
    form = DiffusersSana()
    imported = form.read_settings(FAMILIES["sana"].small(mlp_ratio=(ffn_size + 0.1) / 24).config)
    assert imported.model.ffn_size == ffn_size
    settings, _ = form.write_settings(imported.model, imported.latent_size)
    assert form.read_settings(settings) == imported


@pytest.mark.parametrize("config", [Flux2Config, HunyuanVideoConfig])
def test_the_width_of_a_feed_forward_survives_a_round_trip(config: type[Any]) -> None:
    """245 / 120 * 120 is slightly below 245."""
    model = config(hidden_size=120, num_attention_heads=5, ffn_hidden_size=245)
    form = format_of_model(model)
    settings, _ = form.write_settings(model, (1, 64, 64))
    assert form.read_settings(settings).model.ffn_size == model.ffn_size


def test_old_folders_are_distinguished_and_their_position_tables_checked() -> None:
    """Old files use one class name for DiT and PixArt, and contain the position table, which we compute.

    The table has one position per full patch.
    """
    external = FAMILIES["pixart"].small(interpolation_scale=2, sample_size=9)
    old = {**external.config, "_class_name": "Transformer2DModel"}
    form = format_of_settings(old)
    assert isinstance(form, DiffusersPixArt)
    imported = form.read_settings(old)
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    table = external.pos_embed.pos_embed
    rules.from_external({**external.state_dict(), "pos_embed.pos_embed": table})
    with pytest.raises(ConfigError, match="not the fixed table"):
        rules.from_external({**external.state_dict(), "pos_embed.pos_embed": 2 * table})


def test_a_model_of_oblong_pictures_exports_a_square_of_their_area(build_model: BuildModel) -> None:
    """Positions span one range at every size, so in diffusers the square is only the default size of pictures."""
    form, size = DiffusersPixArt(), (1, 8, 20)
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_layers": 2, "context_size": 20, "position_span": 6.0}
    model = STDiTConfig(**PIXART_MODEL, **sizes, null_text="empty")
    settings, [note] = form.write_settings(model, size)
    assert settings["sample_size"] == 12
    assert "area of 8 x 20" in note
    weights = random_weights(parameter_shapes(model))
    external = PixArtTransformer2DModel.from_config(settings).eval()
    external.load_state_dict(form.rules(model, parameter_shapes(model), size).to_external(weights))
    generator = torch.Generator().manual_seed(1)
    picture, text = torch.randn(1, 4, 1, 8, 20, generator=generator), torch.randn(5, 20, generator=generator)
    here = run(load(build_model(model), weights), model, picture, torch.tensor([0.25]), texts=[text])
    with torch.no_grad():
        (there,) = CALLS[form.class_name](external, picture, torch.tensor([250.0]), {"context": text})
    assert relative_error(here, there) <= RTOL
    for refusing in (model, SD3Config()):
        with pytest.raises(ConfigError, match="draws pictures, not clips"):
            format_of_model(refusing).write_settings(refusing, (2, 8, 8))
