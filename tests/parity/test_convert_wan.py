"""Wan to and from diffusers: equal outputs both ways, exact round trips."""

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from dit.convert.diffusers_wan import DiffusersWan
from dit.errors import ConfigError
from dit.models.wan.config import WanConfig
from dit.parallel.build import parameter_shapes
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_bits, load, random_weights, relative_error, run

RTOL = 1e-5
STEPS = torch.tensor([250.0, 750.0])


def diffusers_model(**changes) -> WanTransformer3DModel:
    settings = {
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 20,
        "ffn_dim": 80,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return WanTransformer3DModel(**{**settings, **changes}).eval()


@pytest.mark.parametrize(
    "changes", [{}, {"patch_size": (2, 2, 2), "out_channels": 6, "eps": 1e-5}], ids=["wan 2.1", "deep patches"]
)
def test_diffusers_module_and_ours_compute_the_same(build_model: BuildModel, changes: dict):
    """Their random module here, and our random model there, on clips of another height than width."""
    form = DiffusersWan()
    theirs = diffusers_model(**changes)
    state = random_weights({name: tuple(x.shape) for name, x in theirs.state_dict().items()}, seed=1)
    theirs.load_state_dict(state)
    imported = form.read_settings(theirs.config)
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    assert_same_bits(rules.to_external(rules.from_external(state)), state)

    ours = random_weights(rules.shapes, seed=2)
    settings, notes = form.write_settings(imported.model, imported.latent_size)
    assert notes == []
    again = WanTransformer3DModel.from_config(settings).eval()
    again.load_state_dict(rules.to_external(ours))
    assert_same_bits(rules.from_external(again.state_dict()), ours)

    generator = torch.Generator().manual_seed(3)
    clips = torch.randn(2, 4, 4, 8, 6, generator=generator)
    texts = torch.randn(2, 5, 20, generator=generator)
    for module, weights in ((theirs, rules.from_external(state)), (again, ours)):
        network = load(build_model(imported.model), weights)
        here = run(network, imported.model, clips, STEPS / 1000, texts=list(texts))
        with torch.no_grad():
            there = module(clips, STEPS, texts).sample
        assert relative_error(here, there) <= RTOL


def test_the_config_survives_a_round_trip():
    form = DiffusersWan()
    theirs = diffusers_model(out_channels=6, rope_max_seq_len=1024).config
    imported = form.read_settings(theirs)
    settings, _ = form.write_settings(imported.model, imported.latent_size)
    public = {name: value for name, value in settings.items() if name[0] != "_"}
    assert public == {**{n: v for n, v in theirs.items() if n[0] != "_"}, "patch_size": [1, 2, 2]}
    assert form.read_settings(settings) == imported


def test_the_defaults_are_the_published_14b():
    form = DiffusersWan()
    imported = form.read_settings({})
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    with torch.device("meta"):
        published = {name: tuple(p.shape) for name, p in WanTransformer3DModel().named_parameters()}
    assert rules.external_shapes() == published


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_dim": 1280}, "image_dim=1280"),
        ({"cross_attn_norm": False}, "cross_attn_norm=False"),
        ({"patch_size": (1, 2, 4)}, r"patch_size=\[1, 2, 4\]"),
    ],
)
def test_settings_that_ours_cannot_follow_are_refused(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        DiffusersWan().read_settings({**diffusers_model().config, **change})


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_layernorm": False},
        {"fps_conditioning": True},
        {"num_query_groups": 4},
        {"rope_theta": 500.0},
        {"time_scale": 1.0},
        {"position_embedding": "sincos_3d"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_model_that_theirs_cannot_hold_is_refused(changes: dict):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DiffusersWan().write_settings(WanConfig(**changes), (1, 8, 8))
