"""PixArt to and from diffusers: equal outputs both ways, exact round trips."""

import pytest
import torch
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

from dit.convert.diffusers_format import format_of_settings
from dit.convert.diffusers_pixart import DiffusersPixArt
from dit.errors import ConfigError
from dit.models.stdit.config import STDiTConfig
from dit.parallel.build import parameter_shapes
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_bits, load, random_weights, relative_error, run

RTOL = 1e-5
STEPS = torch.tensor([0, 37, 999])


def diffusers_model(**changes) -> PixArtTransformer2DModel:
    settings = {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "num_layers": 2,
        "cross_attention_dim": 48,
        "sample_size": 8,
        "caption_channels": 20,
    }
    return PixArtTransformer2DModel(**{**settings, **changes}).eval()


@pytest.mark.parametrize(
    ("changes", "image"),
    [({}, (8, 8)), ({"interpolation_scale": 2, "out_channels": 4}, (8, 8)), ({}, (12, 4))],
    ids=["native", "interpolated", "another shape"],
)
def test_diffusers_module_and_ours_compute_the_same(build_model: BuildModel, changes: dict, image: tuple[int, int]):
    """Their random module here, and our random model there; texts of different lengths."""
    form = DiffusersPixArt()
    theirs = diffusers_model(**changes)
    state = random_weights({name: tuple(x.shape) for name, x in theirs.state_dict().items()}, seed=1)
    theirs.load_state_dict(state)
    imported = form.read_settings(theirs.config)
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    assert_same_bits(rules.to_external(rules.from_external(state)), state)

    ours = random_weights(rules.shapes, seed=2)
    settings, notes = form.write_settings(imported.model, imported.latent_size)
    assert notes == []
    again = PixArtTransformer2DModel.from_config(settings).eval()
    again.load_state_dict(rules.to_external(ours))
    assert_same_bits(rules.from_external(again.state_dict()), ours)

    generator = torch.Generator().manual_seed(3)
    images = torch.randn(3, 4, *image, generator=generator)
    texts = [torch.randn(length, 20, generator=generator) for length in (5, 1, 3)]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=7.0)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(text)) for text in texts], batch_first=True)
    for module, weights in ((theirs, rules.from_external(state)), (again, ours)):
        network = load(build_model(imported.model), weights)
        here = run(network, imported.model, images[:, :, None], STEPS / 1000, texts=texts)[:, :, 0]
        with torch.no_grad():
            there = module(images, padded, STEPS, encoder_attention_mask=mask).sample
        assert relative_error(here, there) <= RTOL


def test_the_config_survives_a_round_trip():
    form = DiffusersPixArt()
    theirs = diffusers_model(sample_size=16, interpolation_scale=4, patch_size=4, use_additional_conditions=False)
    imported = form.read_settings(theirs.config)
    settings, _ = form.write_settings(imported.model, imported.latent_size)
    assert {n: v for n, v in settings.items() if n[0] != "_"} == {n: v for n, v in theirs.config.items() if n[0] != "_"}
    assert form.read_settings(settings) == imported


def test_old_folders_are_told_apart_and_their_position_tables_checked():
    """Old files call DiT and PixArt by one name and have the positions, which are computed here."""
    old = {**diffusers_model(interpolation_scale=2).config, "_class_name": "Transformer2DModel"}
    form = format_of_settings(old)
    assert isinstance(form, DiffusersPixArt)
    imported = form.read_settings(old)
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    theirs = diffusers_model(interpolation_scale=2)
    table = theirs.pos_embed.pos_embed
    rules.from_external({**theirs.state_dict(), "pos_embed.pos_embed": table})
    with pytest.raises(ConfigError, match="not the fixed table"):
        rules.from_external({**theirs.state_dict(), "pos_embed.pos_embed": 2 * table})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_additional_conditions": True}, "use_additional_conditions=True"),
        ({"sample_size": 128}, "use_additional_conditions=True"),
        ({"cross_attention_dim": 24}, "cross_attention_dim=24"),
        ({"caption_channels": None}, "caption_channels=None"),
    ],
)
def test_settings_that_ours_cannot_follow_are_refused(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        DiffusersPixArt().read_settings({**diffusers_model().config, **change})


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_pattern": ["spatial", "temporal"]},
        {"qk_layernorm": True},
        {"fps_conditioning": True},
        {"time_scale": 1.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_model_that_theirs_cannot_hold_is_refused(changes: dict):
    plain = {"layer_pattern": ["full"], "qk_layernorm": False, "fps_conditioning": False}
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DiffusersPixArt().write_settings(STDiTConfig(**{**plain, **changes}), (1, 8, 8))


def test_a_model_of_oblong_pictures_gets_the_square_of_their_area(build_model: BuildModel):
    """Positions span one range at every size, so the square is only the default of what is drawn there."""
    form, size = DiffusersPixArt(), (1, 8, 20)
    plain = {"layer_pattern": ["full"], "qk_layernorm": False, "fps_conditioning": False, "null_text": "empty"}
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_layers": 2, "context_size": 20, "position_span": 6.0}
    model = STDiTConfig(**plain, **sizes)
    settings, [note] = form.write_settings(model, size)
    assert settings["sample_size"] == 12
    assert "area of 8 x 20" in note
    weights = random_weights(parameter_shapes(model))
    theirs = PixArtTransformer2DModel.from_config(settings).eval()
    theirs.load_state_dict(form.rules(model, parameter_shapes(model), size).to_external(weights))
    images, texts = torch.randn(3, 4, 8, 20), torch.randn(3, 5, 20)
    here = run(load(build_model(model), weights), model, images[:, :, None], STEPS / 1000, texts=list(texts))[:, :, 0]
    with torch.no_grad():
        assert relative_error(here, theirs(images, texts, STEPS).sample) <= RTOL
    with pytest.raises(ConfigError, match="draws pictures, not clips"):
        form.write_settings(model, (2, 8, 8))
