"""The VQ autoencoder against the paper's formulas and diffusers' VQModel: outputs, losses, gradients, round trips."""

from functools import partial

import pytest
import torch
from diffusers import VQModel
from torch import Tensor

from dit.convert.diffusers_autoencoder import DiffusersVQModel
from dit.objectives.vq_autoencoding import VQAutoencoding
from dit.parallel.build import parameter_shapes
from dit.verify.compare import tensor_errors
from tests.conftest import BuildModel
from tests.laws.backbones import pack
from tests.parity.convert_cases import assert_same_bits, load, pictures_of, plain, random_weights, relative_error
from tests.support.encoders import autoencoder_blocks
from tests.unit.objectives.packs import noise_for

RTOL, GRADIENT_RTOL = 1e-5, 1e-4  # float32
SIZES = {
    "deep": {**autoencoder_blocks(8, 16, 24), "layers_per_block": 2, "norm_num_groups": 4, "latent_channels": 5},
    "flat": {
        **{**autoencoder_blocks(8, 8), "norm_num_groups": 2, "mid_block_add_attention": False},
        **{"num_vq_embeddings": 40, "vq_embed_dim": 3, "scaling_factor": 0.7},
    },
}


def public(name: str) -> tuple[VQModel, dict[str, Tensor]]:
    """Return a VQModel with the published loss, and its random weights, which use several entries of the codebook."""
    model = VQModel(**SIZES[name]).eval()
    model.quantize.legacy = False
    state = random_weights({n: tuple(x.shape) for n, x in model.state_dict().items()}, scale=0.3, seed=1)
    model.load_state_dict(state)
    return model, state


@pytest.mark.parametrize("name", SIZES)
def test_outputs_losses_and_gradients_equal_those_of_the_public_class(build_model: BuildModel, name: str) -> None:
    """Pictures are not square; the number of entries is not a multiple of the tokens."""
    form, (external, state) = DiffusersVQModel(), public(name)
    imported = form.read_settings(external.config)
    model = imported.model
    settings, notes = form.write_settings(model, imported.latent_size)
    assert (form.read_settings(settings), notes) == (imported, [])
    assert imported.objective == VQAutoencoding()
    changed = {n for n, x in plain(VQModel.from_config(settings).config).items() if x != plain(external.config)[n]}
    assert changed <= {"vq_embed_dim"}  # explicit instead of None
    rules = form.rules(model, parameter_shapes(model), (1, 32, 32))
    assert_same_bits(rules.to_external(rules.from_external(state)), state)
    network = build_model(model)
    assert network.codebook.entries.abs().max() <= 1 / model.codebook_size
    load(network, rules.from_external(state))
    batch = pack(model, [0, 1, 2])
    objective = VQAutoencoding()
    prepared = objective.prepare(batch, noise_for(batch))
    prediction_TC = network(prepared.inputs_TC, torch.zeros(3), batch)
    C, z, p = model.token_channels, model.latent_channels, model.patch_spatial
    pictures = partial(pictures_of, batch)
    x = pictures(batch.latents_TC, p)
    decoded = external(x)
    z_NCHW = external.encode(x).latents
    _, _, (_, _, code) = external.quantize(z_NCHW)
    assert len(code.unique()) > 5
    output_TC = prediction_TC.detach()
    assert relative_error(pictures(output_TC[:, :C], p), decoded.sample.detach()) <= RTOL
    assert relative_error(pictures(output_TC[:, C : C + z], 1), z_NCHW.detach()) <= RTOL
    assert torch.equal(pictures(output_TC[:, -1:], 1).flatten(), code.float())

    total, count, logs = objective.loss(prediction_TC, prepared, batch.layout)
    exact = (decoded.sample - x).abs().mean() + decoded.commit_loss
    assert total.item() / count.item() == pytest.approx(exact.item(), rel=RTOL)
    assert logs["codebook"].item() == pytest.approx(4 * logs["commitment"].item(), rel=RTOL)
    (total / count).backward()
    exact.backward()
    actual = rules.to_external({n: p.grad for n, p in network.named_parameters()})
    for parameter, error in tensor_errors({n: p.grad for n, p in external.named_parameters()}, actual).items():
        assert error <= GRADIENT_RTOL, parameter
