"""The VQ autoencoder against the paper's formulas and diffusers' VQModel: outputs, losses, gradients, round trips."""

from pathlib import Path

import pytest
import torch
from diffusers import VQModel
from torch import Tensor

from dit.convert.diffusers_autoencoder import DiffusersAutoencoder, DiffusersVQModel
from dit.convert.diffusers_format import format_of_model, format_of_settings
from dit.convert.state_files import read_diffusers, write_diffusers
from dit.errors import ConfigError
from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.autoencoder.layer import Codebook
from dit.objectives.vq_autoencoding import VQAutoencoding
from dit.parallel.build import parameter_shapes
from dit.patchify import unpatchify
from dit.verify.compare import tensor_errors
from tests.conftest import BuildModel
from tests.laws.backbones import pack
from tests.parity.convert_cases import assert_same_bits, load, plain, random_weights, relative_error
from tests.unit.objectives.packs import noise_for

RTOL, GRADIENT_RTOL = 1e-5, 1e-4  # float32
SIZES = {
    "deep": {"block_out_channels": (8, 16, 24), "layers_per_block": 2, "norm_num_groups": 4, "latent_channels": 5},
    "flat": {
        **{"block_out_channels": (8, 8), "norm_num_groups": 2, "mid_block_add_attention": False},
        **{"num_vq_embeddings": 40, "vq_embed_dim": 3, "scaling_factor": 0.7},
    },
}


def public(name: str) -> tuple[VQModel, dict[str, Tensor]]:
    """Return a VQModel with the published loss, and its random weights, which use several entries of the codebook."""
    changes = SIZES[name]
    resolutions = len(changes["block_out_channels"])
    kinds = {
        "down_block_types": ("DownEncoderBlock2D",) * resolutions,
        "up_block_types": ("UpDecoderBlock2D",) * resolutions,
    }
    model = VQModel(**kinds, **changes).eval()
    model.quantize.legacy = False
    state = random_weights({n: tuple(x.shape) for n, x in model.state_dict().items()}, scale=0.3, seed=1)
    model.load_state_dict(state)
    return model, state


@pytest.mark.parametrize("name", SIZES)
def test_outputs_losses_and_gradients_equal_those_of_the_public_class(build_model: BuildModel, name: str) -> None:
    """Pictures are not square; the number of entries is not a multiple of the tokens."""
    form, (external, state) = DiffusersVQModel(), public(name)
    model = form.read_settings(external.config).model
    rules = form.rules(model, parameter_shapes(model), (1, 32, 32))
    network = load(build_model(model), rules.from_external(state))
    batch = pack(model, [0, 1, 2])
    objective = VQAutoencoding()
    prepared = objective.prepare(batch, noise_for(batch))
    prediction_TC = network(prepared.inputs_TC, torch.zeros(3), batch)
    C, z, p = model.token_channels, model.latent_channels, model.patch_spatial

    def pictures(x_TC: Tensor, patch: int) -> Tensor:
        parts = zip(x_TC.split(list(batch.layout.lengths)), batch.grids)
        return torch.stack([unpatchify(x, grid, 1, patch)[:, 0] for x, grid in parts])

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


def test_the_nearest_entry_replaces_a_vector_and_passes_its_gradient(build_model: BuildModel) -> None:
    """Eq. 1 and 2 in float64; an entry receives the gradients of all vectors that it replaces."""
    settings = DiffusersVQModel().read_settings(public("flat")[0].config).model
    codebook = build_model(settings).codebook
    assert isinstance(codebook, Codebook)
    assert codebook.entries.abs().max() <= 1 / 40
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        codebook.entries.copy_(torch.randn(40, 3, generator=generator))
    z = torch.randn(2, 3, 4, 6, generator=generator).requires_grad_()
    quantized, entries, code = codebook(z)
    distances = (z.detach().double()[:, None] - codebook.entries.detach().double()[None, :, :, None, None]).square()
    nearest = distances.sum(2).argmin(1)
    assert torch.equal(code[:, 0], nearest)
    assert torch.equal(entries, codebook.entries[nearest].permute(0, 3, 1, 2))
    torch.testing.assert_close(quantized, entries)
    cotangent = torch.randn(z.shape, generator=generator)
    quantized.backward(cotangent, retain_graph=True)
    assert torch.equal(z.grad, cotangent)
    assert codebook.entries.grad is None
    entries.backward(cotangent)
    exact = torch.zeros(40, 3).index_add_(0, nearest.flatten(), cotangent.permute(0, 2, 3, 1).reshape(-1, 3))
    torch.testing.assert_close(codebook.entries.grad, exact)


@pytest.mark.parametrize("name", SIZES)
def test_a_folder_of_the_public_class_survives_a_round_trip_to_the_bit(tmp_path: Path, name: str) -> None:
    external, state = public(name)
    external.save_pretrained(tmp_path / "theirs")
    settings, stored = read_diffusers(tmp_path / "theirs")
    form = format_of_settings(settings)
    assert isinstance(form, DiffusersVQModel)
    imported = form.read_settings(settings)
    assert imported.objective == VQAutoencoding()
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    weights = rules.from_external(stored)
    written, notes = format_of_model(imported.model).write_settings(imported.model, imported.latent_size)
    assert notes == []
    assert form.read_settings(written) == imported
    write_diffusers(written, rules.to_external(weights), tmp_path / "ours", texts={})
    again = VQModel.from_pretrained(tmp_path / "ours", low_cpu_mem_usage=False)
    assert_same_bits(again.state_dict(), state)
    changed = {n for n, x in plain(again.config).items() if x != plain(external.config)[n]}
    assert changed <= {"vq_embed_dim"}  # explicit instead of None
    assert again.quantize.vq_embed_dim == external.quantize.vq_embed_dim


def test_the_codebook_selects_the_class() -> None:
    """The published vq-f4 has 55,322,782 parameters."""
    kl = AutoencoderConfig()
    vq = AutoencoderConfig(
        patch_spatial=4, latent_channels=3, block_out_channels=[128, 256, 512], codebook_size=8192, scaling_factor=2.0
    )
    forms = [format_of_model(model) for model in (kl, vq)]
    assert [type(form) for form in forms] == [DiffusersAutoencoder, DiffusersVQModel]
    settings, _ = forms[1].write_settings(vq, (1, 256, 256))
    with torch.device("meta"):
        external = {name: tuple(p.shape) for name, p in VQModel.from_config(settings).named_parameters()}
    assert forms[1].rules(vq, parameter_shapes(vq), (1, 256, 256)).external_shapes() == external
    assert sum(torch.Size(shape).numel() for shape in external.values()) == 55_322_782
    assert VQModel.from_config(settings).config.scaling_factor == 2.0
    assert not isinstance(format_of_settings({"_class_name": "AutoencoderKL"}), DiffusersVQModel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_type": "spatial"}, "norm_type='spatial'"),
        ({"lookup_from_codebook": True}, "lookup_from_codebook=True"),
        ({"vq_embed_dim": 8}, "vq_embed_dim=8 and latent_channels=3"),
        ({"out_channels": 6}, "VQModel of blocks .* from 3 to 6 channels"),
    ],
)
def test_unsupported_settings_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiffusersVQModel().read_settings({**public("flat")[0].config, **change})
