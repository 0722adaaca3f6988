"""FLUX to and from diffusers: equal outputs both ways, exact round trips."""

from dataclasses import replace

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from dit.convert.diffusers_flux import DiffusersFlux
from dit.errors import ConfigError
from dit.models.flux.config import FluxConfig
from dit.parallel.build import parameter_shapes
from dit.verify.public import call_flux
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_bits, load, random_weights, relative_error, run

RTOL = 1e-5
TIME = torch.tensor([0.25, 0.75])  # exact in float32, also times 1000


def diffusers_model(**changes) -> FluxTransformer2DModel:
    settings = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "joint_attention_dim": 20,
        "pooled_projection_dim": 12,
        "axes_dims_rope": (4, 6, 6),
    }
    return FluxTransformer2DModel(**{**settings, **changes}).eval()


@torch.no_grad()
def predict(module: FluxTransformer2DModel, images: Tensor, texts: Tensor, pooled: Tensor, **others: Tensor) -> Tensor:
    """Run their network on images."""
    (prediction,) = call_flux(module, images[:, :, None], 1000 * TIME, {"context": texts, "pooled": pooled, **others})
    return prediction[:, :, 0]


@pytest.mark.parametrize("guided", [False, True], ids=["schnell", "dev"])
def test_diffusers_module_and_ours_compute_the_same(build_model: BuildModel, guided: bool):
    """Their random module here, and our random model there."""
    form = DiffusersFlux()
    theirs = diffusers_model(guidance_embeds=guided)
    state = random_weights({name: tuple(x.shape) for name, x in theirs.state_dict().items()}, seed=1)
    theirs.load_state_dict(state)
    imported = form.read_settings(theirs.config)
    # At the usual scale of 3.5 the sinusoid's angles reach 3500, where theirs, in float32, are off by 1e-4.
    model = replace(imported.model, guidance=0.25) if guided else imported.model
    rules = form.rules(model, parameter_shapes(model), imported.latent_size)
    assert_same_bits(rules.to_external(rules.from_external(state)), state)

    ours = random_weights(rules.shapes, seed=2) | {name: torch.zeros(rules.shapes[name]) for name in rules.unmatched}
    settings, notes = form.write_settings(model, imported.latent_size)
    assert notes == []
    again = FluxTransformer2DModel.from_config(settings).eval()
    again.load_state_dict(rules.to_external(ours))
    assert_same_bits(rules.from_external(again.state_dict()), ours)

    generator = torch.Generator().manual_seed(3)
    images = torch.randn(2, 4, 8, 6, generator=generator)
    texts, pooled = torch.randn(2, 5, 20, generator=generator), torch.randn(2, 12, generator=generator)
    given = {"guidance": torch.full((2,), 0.25)} if guided else {}
    for module, weights in ((theirs, rules.from_external(state)), (again, ours)):
        network = load(build_model(model), weights)
        here = run(network, model, images[:, :, None], TIME, texts=list(texts), others={"pooled": pooled})[:, :, 0]
        assert relative_error(here, predict(module, images, texts, pooled, **given)) <= RTOL


def test_the_config_survives_a_round_trip():
    form = DiffusersFlux()
    theirs = diffusers_model(guidance_embeds=True, out_channels=32).config
    imported = form.read_settings(theirs)
    settings, _ = form.write_settings(imported.model, imported.latent_size)
    public = {name: value for name, value in settings.items() if name[0] != "_"}
    assert public == {**{n: v for n, v in theirs.items() if n[0] != "_"}, "axes_dims_rope": [4, 6, 6]}
    assert form.read_settings(settings) == imported


def test_the_defaults_are_the_published_12b():
    """FLUX.1-schnell has 11.89 B parameters in diffusers; ours has its two null vectors more."""
    form = DiffusersFlux()
    imported = form.read_settings({})
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    count = sum(torch.Size(shape).numel() for shape in rules.external_shapes().values())
    with torch.device("meta"):
        assert count == sum(p.numel() for p in FluxTransformer2DModel().parameters())


@pytest.mark.parametrize(
    "changes",
    [
        *({"patch_spatial": 1}, {"ffn_hidden_size": 96}, {"time_scale": 1.0}, {"rope_theta": 500.0}),
        {"position_embedding": "sincos_3d"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_model_that_theirs_cannot_hold_is_refused(changes: dict):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DiffusersFlux().write_settings(FluxConfig(**changes), (1, 8, 8))


def test_tokens_that_are_no_patches_are_refused():
    with pytest.raises(ConfigError, match="in_channels=18"):
        DiffusersFlux().read_settings({**diffusers_model().config, "in_channels": 18})
