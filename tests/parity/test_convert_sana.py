"""SANA to and from diffusers: equal outputs both ways, exact round trips."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel

from dit.convert.diffusers_sana import DiffusersSana
from dit.errors import ConfigError
from dit.models.sana.config import SanaConfig
from dit.parallel.build import parameter_shapes
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_bits, load, random_weights, relative_error, run

RTOL = 1e-5
STEPS = torch.tensor([250.0, 750.0])


def diffusers_model(**changes: Any) -> SanaTransformer2DModel:
    settings = {
        "num_attention_heads": 6,
        "attention_head_dim": 4,
        "num_cross_attention_heads": 3,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 24,
        "in_channels": 4,
        "out_channels": 4,
        "caption_channels": 20,
        "num_layers": 2,
        "sample_size": 8,
    }
    return SanaTransformer2DModel(**{**settings, **changes}).eval()


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": "rms_norm_across_heads", "mlp_ratio": 3.0}, {"patch_size": 2, "out_channels": 6}],
    ids=["sana", "sana 1.5", "patches"],
)
def test_diffusers_module_and_ours_compute_the_same(build_model: BuildModel, changes: dict):
    """Their random module here, and our random model there, on pictures of another height than width."""
    form = DiffusersSana()
    theirs = diffusers_model(**changes)
    state = random_weights({name: tuple(x.shape) for name, x in theirs.state_dict().items()}, seed=1)
    theirs.load_state_dict(state)
    imported = form.read_settings(theirs.config)
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    assert_same_bits(rules.to_external(rules.from_external(state)), state)

    ours = random_weights(rules.shapes, seed=2)
    settings, notes = form.write_settings(imported.model, imported.latent_size)
    assert notes == []
    again = SanaTransformer2DModel.from_config(settings).eval()
    again.load_state_dict(rules.to_external(ours))
    assert_same_bits(rules.from_external(again.state_dict()), ours)

    generator = torch.Generator().manual_seed(3)
    pictures = torch.randn(2, 4, 1, 8, 6, generator=generator)
    texts = torch.randn(2, 5, 20, generator=generator)
    for module, weights in ((theirs, rules.from_external(state)), (again, ours)):
        network = load(build_model(imported.model), weights)
        here = run(network, imported.model, pictures, STEPS / 1000, texts=list(texts))
        with torch.no_grad():
            there = module(pictures[:, :, 0], texts, STEPS).sample
        assert relative_error(here[:, :, 0], there) <= RTOL


@pytest.mark.parametrize("ffn_size", [60, 61, 7])
def test_the_config_survives_a_round_trip(ffn_size: int):
    """mlp_ratio is a float, whose product with the width is rounded down."""
    form = DiffusersSana()
    theirs = diffusers_model(out_channels=6, qk_norm="rms_norm_across_heads", mlp_ratio=(ffn_size + 0.1) / 24).config
    imported = form.read_settings(theirs)
    assert imported.model.ffn_size == ffn_size
    settings, _ = form.write_settings(imported.model, imported.latent_size)
    assert form.read_settings(settings) == imported
    changed = {name for name, value in settings.items() if name[0] != "_" and value != theirs[name]}
    assert changed <= {"mlp_ratio"}


def test_the_defaults_are_the_published_1_6b():
    form = DiffusersSana()
    imported = form.read_settings({})
    assert imported.model == SanaConfig(null_text="empty")
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    with torch.device("meta"):
        published = {name: tuple(p.shape) for name, p in SanaTransformer2DModel().named_parameters()}
    assert rules.external_shapes() == published


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interpolation_scale": 2}, "interpolation_scale=2"),
        ({"guidance_embeds": True}, "guidance_embeds=True"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm'"),
        ({"cross_attention_dim": 48}, "cross_attention_dim=48"),
        ({"cross_attention_head_dim": 4}, "num_cross_attention_heads x cross_attention_head_dim=12"),
    ],
)
def test_settings_that_ours_cannot_follow_are_refused(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        DiffusersSana().read_settings({**diffusers_model().config, **change})


@pytest.mark.parametrize(
    "changes",
    [{"fps_conditioning": True}, {"time_scale": 1.0}, {"position_embedding": "sincos_2d"}, {"layernorm_epsilon": 1e-5}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_model_that_theirs_cannot_hold_is_refused(changes: dict):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DiffusersSana().write_settings(SanaConfig(**changes), (1, 8, 8))
