"""The autoencoder against diffusers' AutoencoderKL: equal outputs both ways, exact round trips, settings."""

from functools import partial

import pytest
import torch
from diffusers import AutoencoderKL

from dit.convert.diffusers_autoencoder import DiffusersAutoencoder
from dit.objectives.autoencoding import Autoencoding
from dit.parallel.build import parameter_shapes
from dit.patchify import patchify
from tests.conftest import BuildModel
from tests.laws.backbones import pack
from tests.parity.convert_cases import assert_same_bits, load, pictures_of, plain, random_weights, relative_error
from tests.support.encoders import autoencoder_blocks
from tests.unit.objectives.packs import noise_for

RTOL = 1e-5
SIZES = {
    "deep": {**autoencoder_blocks(8, 16, 24), "layers_per_block": 2, "norm_num_groups": 4, "latent_channels": 5},
    "flat": {**autoencoder_blocks(8, 8), "norm_num_groups": 2, "mid_block_add_attention": False, "shift_factor": 0.2},
}


@pytest.mark.parametrize("name", SIZES)
def test_diffusers_module_has_the_same_outputs(build_model: BuildModel, name: str):
    """Posterior, decoded sample with the same noise, decoded mean; pictures are not square."""
    form, external = DiffusersAutoencoder(), AutoencoderKL(**SIZES[name]).eval()
    state = random_weights({n: tuple(x.shape) for n, x in external.state_dict().items()}, scale=0.3, seed=1)
    external.load_state_dict(state)
    imported = form.read_settings(external.config)
    model = imported.model
    rules = form.rules(model, parameter_shapes(model), imported.latent_size)
    assert_same_bits(rules.to_external(rules.from_external(state)), state)
    settings, notes = form.write_settings(model, imported.latent_size)
    assert notes == []
    assert plain(AutoencoderKL.from_config(settings).config) == plain(external.config)
    assert form.read_settings(settings) == imported

    network = load(build_model(model), rules.from_external(state))
    batch = pack(model, [0, 1, 2])
    prepared = Autoencoding().prepare(batch, noise_for(batch))
    time_S = torch.zeros(3)
    C, z, p = model.token_channels, model.latent_channels, model.patch_spatial
    pictures = partial(pictures_of, batch)

    with torch.no_grad():
        sampled_TC = network(prepared.inputs_TC, time_S, batch)
        mean_TC = network(batch.latents_TC, time_S, batch)
        x, eps = pictures(batch.latents_TC, p), pictures(prepared.inputs_TC[:, C : C + z], 1)
        posterior = external.encode(x).latent_dist
        decoded, decoded_mean = (
            external.decode(latent).sample for latent in (posterior.mean + posterior.std * eps, posterior.mean)
        )
    assert relative_error(pictures(sampled_TC[:, C : C + z], 1), posterior.mean) <= RTOL
    assert relative_error(pictures(sampled_TC[:, C + z :], 1), posterior.logvar) <= RTOL
    assert relative_error(pictures(sampled_TC[:, :C], p), decoded) <= RTOL
    assert relative_error(pictures(mean_TC[:, :C], p), decoded_mean) <= RTOL
    assert relative_error(decoded, decoded_mean) > 0.01
    kl_N = Autoencoding(kl_weight=1.0).loss_terms(sampled_TC, prepared, batch.layout)["kl"].sum_per_level(batch.layout)
    assert relative_error(C * kl_N, posterior.kl()) <= RTOL


def test_the_frames_of_a_clip_are_encoded_one_by_one(build_model: BuildModel):
    model = DiffusersAutoencoder().read_settings(AutoencoderKL(**SIZES["flat"]).config).model
    network = build_model(model, perturb=0.1)
    clip = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(2))
    outs = []
    for latent in (clip, clip[:, :1], clip[:, 1:]):
        tokens, grid = patchify(latent, 1, 2)
        batch = pack(model, [0])
        batch.grids, batch.layout = (grid,), batch.layout.from_lengths([len(tokens)])
        outs.append(network(tokens, torch.zeros(1), batch))
    assert relative_error(torch.cat(outs[1:]), outs[0]) <= RTOL
