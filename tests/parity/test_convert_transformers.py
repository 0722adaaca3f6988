"""Settings of FLUX, PixArt, SANA and Wan in diffusers: published sizes, refusals, old folders."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from dit.convert.diffusers_flux import DiffusersFlux
from dit.convert.diffusers_format import DiffusersFormat, format_of_model, format_of_settings
from dit.convert.diffusers_pixart import DiffusersPixArt
from dit.convert.diffusers_sana import DiffusersSana
from dit.convert.diffusers_wan import DiffusersWan
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.flux.config import FluxConfig
from dit.models.flux2.config import Flux2Config
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.wan.config import WanConfig
from dit.parallel.build import parameter_shapes
from dit.verify.public import CALLS
from tests.conftest import BuildModel
from tests.parity.convert_cases import load, random_weights, relative_error, run

RTOL = 1e-5
PIXART_MODEL = {"layer_pattern": ["full"], "qk_layernorm": False, "fps_conditioning": False}


@dataclass(frozen=True)
class Family:
    """A class of diffusers.

    Attributes:
        settings: arguments of a small network.
        unsupported: settings that our config does not support, and text in the error.
        model: our config, supported by diffusers; `beyond` has changes that diffusers does not support.
    """

    form: DiffusersFormat[Any]
    external: Any
    settings: dict[str, Any]
    model: ModelConfig
    beyond: list[dict[str, Any]]
    unsupported: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def small(self, **changes: Any) -> Any:
        return self.external(**{**self.settings, **changes}).eval()


FAMILIES = {
    "flux": Family(
        DiffusersFlux(),
        FluxTransformer2DModel,
        {
            **{"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16},
            **{"num_attention_heads": 3, "joint_attention_dim": 20, "pooled_projection_dim": 12},
            "axes_dims_rope": (4, 6, 6),
        },
        unsupported=[({"in_channels": 18}, "in_channels=18")],
        model=FluxConfig(),
        beyond=[
            *({"patch_spatial": 1}, {"ffn_hidden_size": 96}, {"time_scale": 1.0}, {"rope_theta": 500.0}),
            {"position_embedding": "sincos_3d"},
        ],
    ),
    "pixart": Family(
        DiffusersPixArt(),
        PixArtTransformer2DModel,
        {
            **{"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 48},
            **{"sample_size": 8, "caption_channels": 20},
        },
        unsupported=[
            ({"use_additional_conditions": True}, "use_additional_conditions=True"),
            ({"sample_size": 128}, "use_additional_conditions=True"),
            ({"cross_attention_dim": 24}, "cross_attention_dim=24"),
            ({"caption_channels": None}, "caption_channels=None"),
        ],
        model=STDiTConfig(**PIXART_MODEL),
        beyond=[
            *({"layer_pattern": ["spatial", "temporal"]}, {"qk_layernorm": True}, {"fps_conditioning": True}),
            {"time_scale": 1.0},
        ],
    ),
    "sana": Family(
        DiffusersSana(),
        SanaTransformer2DModel,
        {
            **{"num_attention_heads": 6, "attention_head_dim": 4, "num_cross_attention_heads": 3},
            **{"cross_attention_head_dim": 8, "cross_attention_dim": 24, "in_channels": 4, "out_channels": 4},
            **{"caption_channels": 20, "num_layers": 2, "sample_size": 8},
        },
        unsupported=[
            ({"interpolation_scale": 2}, "interpolation_scale=2"),
            ({"guidance_embeds": True}, "guidance_embeds=True"),
            ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm'"),
            ({"cross_attention_dim": 48}, "cross_attention_dim=48"),
            ({"cross_attention_head_dim": 4}, "num_cross_attention_heads x cross_attention_head_dim=12"),
        ],
        model=SanaConfig(),
        beyond=[
            *({"fps_conditioning": True}, {"time_scale": 1.0}, {"position_embedding": "sincos_2d"}),
            {"layernorm_epsilon": 1e-5},
        ],
    ),
    "wan": Family(
        DiffusersWan(),
        WanTransformer3DModel,
        {
            **{"num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4},
            **{"text_dim": 20, "ffn_dim": 80, "num_layers": 2, "rope_max_seq_len": 32},
        },
        unsupported=[
            ({"image_dim": 1280}, "image_dim=1280"),
            ({"cross_attn_norm": False}, "cross_attn_norm=False"),
            ({"patch_size": (1, 2, 4)}, r"patch_size=\[1, 2, 4\]"),
        ],
        model=WanConfig(),
        beyond=[
            *({"qk_layernorm": False}, {"fps_conditioning": True}, {"num_query_groups": 4}, {"rope_theta": 500.0}),
            *({"time_scale": 1.0}, {"position_embedding": "sincos_3d"}),
        ],
    ),
}
UNSUPPORTED = [(name, *case) for name, family in FAMILIES.items() for case in family.unsupported]
BEYOND = [(name, changes) for name, family in FAMILIES.items() for changes in family.beyond]


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


@pytest.mark.parametrize("name", ["flux", "sana", "wan"])
def test_the_defaults_are_the_published_model(name: str) -> None:
    """Names and shapes of FLUX.1-schnell, SANA 1.6B and Wan 2.1 14B."""
    family = FAMILIES[name]
    imported = family.form.read_settings({})
    rules = family.form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    with torch.device("meta"):
        published = {key: tuple(p.shape) for key, p in family.external().named_parameters()}
    assert rules.external_shapes() == published
    assert name != "sana" or imported.model == SanaConfig(null_text="empty")


@pytest.mark.parametrize(("name", "change", "message"), UNSUPPORTED)
def test_unsupported_settings_are_refused(name: str, change: dict, message: str) -> None:
    family = FAMILIES[name]
    with pytest.raises(ConfigError, match=message):
        family.form.read_settings({**family.small().config, **change})


@pytest.mark.parametrize(("name", "changes"), BEYOND, ids=str)
def test_a_model_without_a_diffusers_form_is_refused(name: str, changes: dict) -> None:
    family = FAMILIES[name]
    with pytest.raises(ConfigError, match=next(iter(changes))):
        family.form.write_settings(replace(family.model, **changes), (1, 8, 8))


def test_old_folders_are_distinguished_and_their_position_tables_checked() -> None:
    """Old files use one class name for DiT and PixArt, and contain the position table, which we compute."""
    external = FAMILIES["pixart"].small(interpolation_scale=2)
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
    with pytest.raises(ConfigError, match="draws pictures, not clips"):
        form.write_settings(model, (2, 8, 8))
