"""FLUX, PixArt, SANA and Wan to and from diffusers: equal outputs both ways, exact round trips."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from dit.convert.diffusers_flux import DiffusersFlux
from dit.convert.diffusers_format import DiffusersFormat, format_of_settings
from dit.convert.diffusers_pixart import DiffusersPixArt
from dit.convert.diffusers_sana import DiffusersSana
from dit.convert.diffusers_wan import DiffusersWan
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.flux.config import FluxConfig
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.wan.config import WanConfig
from dit.parallel.build import parameter_shapes
from dit.verify.public import call_flux
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_bits, load, random_weights, relative_error, run

RTOL = 1e-5
TIME = torch.tensor([0.25, 0.75])  # exact in float32, also times 1000
PIXART_STEPS = torch.tensor([0, 37, 999])
PIXART_MODEL = {"layer_pattern": ["full"], "qk_layernorm": False, "fps_conditioning": False}

Compared = tuple[Tensor, Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@torch.no_grad()
def predict_flux(module: nn.Module, images: Tensor, texts: Tensor, pooled: Tensor, **others: Tensor) -> Tensor:
    """Run diffusers' network on images."""
    (prediction,) = call_flux(module, images[:, :, None], 1000 * TIME, {"context": texts, "pooled": pooled, **others})
    return prediction[:, :, 0]


def flux(network: nn.Module, theirs: Any, model: FluxConfig) -> Compared:
    images, texts, pooled = normal(2, 4, 8, 6), normal(2, 5, 20), normal(2, 12)
    guidance = {} if model.guidance is None else {"guidance": torch.full((2,), model.guidance)}
    here = run(network, model, images[:, :, None], TIME, texts=list(texts), others={"pooled": pooled})
    return here[:, :, 0], predict_flux(theirs, images, texts, pooled, **guidance)


def pixart_of(height: int, width: int) -> Callable[[nn.Module, Any, STDiTConfig], Compared]:
    def pixart(network: nn.Module, theirs: Any, model: STDiTConfig) -> Compared:
        """Texts have different lengths."""
        images, texts = normal(3, 4, height, width), [normal(length, 20) for length in (5, 1, 3)]
        padded = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=7.0)
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(text)) for text in texts], batch_first=True)
        here = run(network, model, images[:, :, None], PIXART_STEPS / 1000, texts=texts)[:, :, 0]
        return here, theirs(images, padded, PIXART_STEPS, encoder_attention_mask=mask).sample

    return pixart


def sana(network: nn.Module, theirs: Any, model: SanaConfig) -> Compared:
    pictures, texts = normal(2, 4, 1, 8, 6), normal(2, 5, 20)
    here = run(network, model, pictures, TIME, texts=list(texts))
    return here[:, :, 0], theirs(pictures[:, :, 0], texts, 1000 * TIME).sample


def wan(network: nn.Module, theirs: Any, model: WanConfig) -> Compared:
    clips, texts = normal(2, 4, 4, 8, 6), normal(2, 5, 20)
    return run(network, model, clips, TIME, texts=list(texts)), theirs(clips, 1000 * TIME, texts).sample


@dataclass(frozen=True)
class Family:
    """A class of diffusers.

    Attributes:
        settings: of a small network.
        variants: changes of the settings, and the function that returns our prediction and that of diffusers.
        kept: changes of settings that survive a round trip; `lists` come back as lists.
        unsupported: settings that our config does not support, and what the error names.
        model: our config that diffusers supports; `beyond` has changes that it does not support.
    """

    form: DiffusersFormat[Any]
    theirs: Any
    settings: dict[str, Any]
    variants: dict[str, tuple[dict[str, Any], Callable[[nn.Module, Any, Any], Compared]]]
    kept: dict[str, Any]
    model: ModelConfig
    beyond: list[dict[str, Any]]
    unsupported: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    lists: dict[str, Any] = field(default_factory=dict)

    def small(self, **changes: Any) -> Any:
        return self.theirs(**{**self.settings, **changes}).eval()


FAMILIES = {
    "flux": Family(
        DiffusersFlux(),
        FluxTransformer2DModel,
        {
            **{"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16},
            **{"num_attention_heads": 3, "joint_attention_dim": 20, "pooled_projection_dim": 12},
            "axes_dims_rope": (4, 6, 6),
        },
        {"schnell": ({"guidance_embeds": False}, flux), "dev": ({"guidance_embeds": True}, flux)},
        kept={"guidance_embeds": True, "out_channels": 32},
        lists={"axes_dims_rope": [4, 6, 6]},
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
        {
            "native": ({}, pixart_of(8, 8)),
            "interpolated": ({"interpolation_scale": 2, "out_channels": 4}, pixart_of(8, 8)),
            "another shape": ({}, pixart_of(12, 4)),
        },
        kept={"sample_size": 16, "interpolation_scale": 4, "patch_size": 4, "use_additional_conditions": False},
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
        {
            "sana": ({}, sana),
            "sana 1.5": ({"qk_norm": "rms_norm_across_heads", "mlp_ratio": 3.0}, sana),
            "patches": ({"patch_size": 2, "out_channels": 6}, sana),
        },
        kept={"out_channels": 6, "qk_norm": "rms_norm_across_heads", "mlp_ratio": 2.5},
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
        {
            "wan 2.1": ({}, wan),
            "deep patches": ({"patch_size": (2, 2, 2), "out_channels": 6, "eps": 1e-5}, wan),
        },
        kept={"out_channels": 6, "rope_max_seq_len": 1024},
        lists={"patch_size": [1, 2, 2]},
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
VARIANTS = [(name, variant) for name, family in FAMILIES.items() for variant in family.variants]
UNSUPPORTED = [(name, *case) for name, family in FAMILIES.items() for case in family.unsupported]
BEYOND = [(name, changes) for name, family in FAMILIES.items() for changes in family.beyond]


def public(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name[0] != "_"}


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_diffusers_module_and_ours_compute_the_same(build_model: BuildModel, name: str, variant: str) -> None:
    """Their random module here, and our random model there, on pictures and clips of another height than width."""
    family = FAMILIES[name]
    changes, predict = family.variants[variant]
    theirs = family.small(**changes)
    state = random_weights({key: tuple(x.shape) for key, x in theirs.state_dict().items()}, seed=1)
    theirs.load_state_dict(state)
    imported = family.form.read_settings(theirs.config)
    model: Any = imported.model
    # At the usual scale of 3.5 the sinusoid's angles reach 3500, where theirs, in float32, are off by 1e-4.
    model = replace(model, guidance=0.25) if getattr(model, "guidance", None) is not None else model
    rules = family.form.rules(model, parameter_shapes(model), imported.latent_size)
    assert_same_bits(rules.to_external(rules.from_external(state)), state)

    ours = random_weights(rules.shapes, seed=2) | {key: torch.zeros(rules.shapes[key]) for key in rules.unmatched}
    settings, notes = family.form.write_settings(model, imported.latent_size)
    assert notes == []
    exported = family.theirs.from_config(settings).eval()
    exported.load_state_dict(rules.to_external(ours))
    assert_same_bits(rules.from_external(exported.state_dict()), ours)

    for module, weights in ((theirs, rules.from_external(state)), (exported, ours)):
        with torch.no_grad():
            here, there = predict(load(build_model(model), weights), module, model)
        assert relative_error(here, there) <= RTOL


@pytest.mark.parametrize("name", FAMILIES)
def test_the_config_survives_a_round_trip(name: str) -> None:
    family = FAMILIES[name]
    theirs = family.small(**family.kept).config
    imported = family.form.read_settings(theirs)
    settings, _ = family.form.write_settings(imported.model, imported.latent_size)
    assert public(settings) == {**public(theirs), **family.lists}
    assert family.form.read_settings(settings) == imported


@pytest.mark.parametrize("ffn_size", [60, 61, 7])
def test_the_width_of_sanas_feed_forward_survives_a_round_trip(ffn_size: int) -> None:
    """mlp_ratio is a float, whose product with the width is rounded down."""
    form = DiffusersSana()
    imported = form.read_settings(FAMILIES["sana"].small(mlp_ratio=(ffn_size + 0.1) / 24).config)
    assert imported.model.ffn_size == ffn_size
    settings, _ = form.write_settings(imported.model, imported.latent_size)
    assert form.read_settings(settings) == imported


@pytest.mark.parametrize("name", ["flux", "sana", "wan"])
def test_the_defaults_are_the_published_model(name: str) -> None:
    """FLUX.1-schnell, SANA 1.6B, Wan 2.1 14B: names and shapes."""
    family = FAMILIES[name]
    imported = family.form.read_settings({})
    rules = family.form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    with torch.device("meta"):
        published = {key: tuple(p.shape) for key, p in family.theirs().named_parameters()}
    assert rules.external_shapes() == published
    assert name != "sana" or imported.model == SanaConfig(null_text="empty")


@pytest.mark.parametrize(("name", "change", "message"), UNSUPPORTED)
def test_settings_that_ours_cannot_follow_are_refused(name: str, change: dict, message: str) -> None:
    family = FAMILIES[name]
    with pytest.raises(ConfigError, match=message):
        family.form.read_settings({**family.small().config, **change})


@pytest.mark.parametrize(("name", "changes"), BEYOND, ids=str)
def test_a_model_that_theirs_cannot_hold_is_refused(name: str, changes: dict) -> None:
    family = FAMILIES[name]
    with pytest.raises(ConfigError, match=next(iter(changes))):
        family.form.write_settings(replace(family.model, **changes), (1, 8, 8))


def test_old_folders_are_told_apart_and_their_position_tables_checked() -> None:
    """Old files call DiT and PixArt by one name and have the positions, which are computed here."""
    theirs = FAMILIES["pixart"].small(interpolation_scale=2)
    old = {**theirs.config, "_class_name": "Transformer2DModel"}
    form = format_of_settings(old)
    assert isinstance(form, DiffusersPixArt)
    imported = form.read_settings(old)
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    table = theirs.pos_embed.pos_embed
    rules.from_external({**theirs.state_dict(), "pos_embed.pos_embed": table})
    with pytest.raises(ConfigError, match="not the fixed table"):
        rules.from_external({**theirs.state_dict(), "pos_embed.pos_embed": 2 * table})


def test_a_model_of_oblong_pictures_gets_the_square_of_their_area(build_model: BuildModel) -> None:
    """Positions span one range at every size, so the square is only the default size of pictures there."""
    form, size = DiffusersPixArt(), (1, 8, 20)
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_layers": 2, "context_size": 20, "position_span": 6.0}
    model = STDiTConfig(**PIXART_MODEL, **sizes, null_text="empty")
    settings, [note] = form.write_settings(model, size)
    assert settings["sample_size"] == 12
    assert "area of 8 x 20" in note
    weights = random_weights(parameter_shapes(model))
    theirs = PixArtTransformer2DModel.from_config(settings).eval()
    theirs.load_state_dict(form.rules(model, parameter_shapes(model), size).to_external(weights))
    with torch.no_grad():
        here, there = pixart_of(8, 20)(load(build_model(model), weights), theirs, model)
    assert relative_error(here, there) <= RTOL
    with pytest.raises(ConfigError, match="draws pictures, not clips"):
        form.write_settings(model, (2, 8, 8))
