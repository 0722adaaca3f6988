"""Samples of latent models are decoded to pictures by their autoencoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dit.batch import PackedBatch
from dit.encoders.vae import VAE, Geometry, _loaded, load_vae
from dit.errors import ConfigError
from dit.inference import decoding
from dit.inference.decoding import Decoder, find_autoencoder
from dit.inference.preview import PictureWriter, held_out_pictures
from dit.models.dit.config import DiTConfig
from dit.models.flux.config import FluxConfig
from dit.objectives.flow_matching import FlowMatching
from dit.patchify import patchify
from dit.run_config import RunConfig
from dit.sampling.clips import clip_grid
from dit.sampling.generate import empty_pack
from dit.sampling.grid import enlargement, tile_origin, to_bytes
from dit.sampling.references import add_references
from dit.settings import SamplingConfig, TrainingConfig
from energon_data.mock import MockData
from launch.initial_picture import read_initial
from tests.conftest import BuildModel
from tests.support.batches import generate
from tests.unit.encoders.test_vae import MODELS

CPU = torch.device("cpu")
ROUNDING = 1e-5  # fp32: a convolution over another batch adds in another order


@pytest.fixture(scope="module")
def autoencoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Save autoencoders of pictures and of clips with random weights."""
    folders = {}
    for name in ("image", "wan"):
        kind, config = MODELS[name]
        torch.manual_seed(0)
        folders[name] = str(tmp_path_factory.mktemp(name))
        kind(**config).save_pretrained(folders[name])
    return folders


def test_an_autoencoder_that_encodes_and_decodes_is_loaded_once(autoencoders: dict[str, str], tmp_path: Path) -> None:
    """`launch.sample --first-frame` encodes a picture before it decodes samples."""
    Image.new("RGB", (32, 32)).save(tmp_path / "first.png")
    _loaded.cache_clear()
    decoder, geometry = Decoder(autoencoders["image"], CPU), Geometry.read(autoencoders["image"])
    latent = read_initial(tmp_path / "first.png", (1, 16, 16), geometry.channels, decoder)
    decoder(latent[None])
    assert _loaded.cache_info().misses == 1
    vae = load_vae(autoencoders["image"], "cpu")
    vae.decode(latent[None], tile=16)
    assert vae._model.use_tiling
    torch.testing.assert_close(
        vae.encode(-torch.ones(1, 3, *geometry.pixel_shape(1, 16, 16)))[0], latent, rtol=0, atol=ROUNDING
    )
    assert not vae._model.use_tiling


def test_an_autoencoder_that_changed_is_loaded_again(tmp_path: Path) -> None:
    """A notebook that trains and exports an autoencoder writes to the same folder again."""
    kind, config = MODELS["image"]
    pictures = []
    for seed in range(2):
        torch.manual_seed(seed)
        kind(**config).save_pretrained(tmp_path)
        pictures.append(Decoder(str(tmp_path), CPU)(torch.ones(1, 4, 1, 4, 4)))
    assert not torch.equal(*pictures)


@pytest.mark.parametrize("name", ["image", "wan"])
def test_a_sample_is_decoded_the_same_in_any_batch(
    autoencoders: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches may be as small as one picture; scale, shift and frame count are the autoencoder's."""
    geometry = Geometry.read(autoencoders[name])
    latents = torch.randn(3, geometry.channels, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(decoding, "PIXELS_AT_ONCE", 1)
    pictures = Decoder(autoencoders[name], CPU)(latents)
    assert tuple(pictures.shape) == (3, 3, *geometry.pixel_shape(2, 4, 6))
    torch.testing.assert_close(pictures, VAE(autoencoders[name]).decode(latents), rtol=0, atol=ROUNDING)
    assert pictures.std() > 0.01


def test_pixels_are_unchanged() -> None:
    pixels = torch.rand(2, 3, 1, 4, 4) * 2 - 1
    assert torch.equal(Decoder(None, CPU)(pixels), pixels)


def test_without_an_autoencoder_a_note_has_the_option_that_selects_one(
    autoencoders: dict[str, str], tmp_path: Path
) -> None:
    image, gone = autoencoders["image"], str(tmp_path / "gone")
    for recorded, why in ((None, "names no autoencoder"), (gone, repr(gone)), (autoencoders["wan"], "16")):
        found, note = find_autoencoder(4, None, recorded, "--vae PATH")
        assert found is None
        assert note is not None
        assert "latents of 4 channels are drawn as false colours" in note
        assert why in note
        assert note.endswith("--vae PATH")
    assert find_autoencoder(4, None, image, "--vae PATH") == (image, None)
    assert find_autoencoder(4, image, gone, "--vae PATH") == (image, None)
    assert find_autoencoder(3, None, None, "--vae PATH") == (None, None)


def test_a_requested_autoencoder_must_fit(autoencoders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decodes latents of 16 channels, but the model has 4"):
        find_autoencoder(4, autoencoders["wan"], None, "--vae PATH")
    with pytest.raises(ConfigError, match="no autoencoder at "):
        find_autoencoder(4, str(tmp_path / "gone"), autoencoders["image"], "--vae PATH")


def test_the_grid_while_training_shows_decoded_samples(autoencoders: dict[str, str], build_model: BuildModel) -> None:
    """Every tile is the decoded sample; a rank without tiles draws no grid."""
    model = DiTConfig(hidden_size=32, num_layers=1, num_attention_heads=2, num_classes=2)
    network, spec = build_model(model, perturb=0.1), model.batch_spec()
    asked, size = SamplingConfig(num_steps=2, guidance_scale=1.0), (1, 4, 4)
    writer = PictureWriter(model, FlowMatching(), spec, asked, None, None, autoencoders["image"])
    (grid,) = writer.draw(network, size, 1.0)
    plain = PictureWriter(model, FlowMatching(), spec, asked, None)
    assert (writer.note, plain.note is None) == (None, False)
    assert plain.draw(network, size, 1.0, lay_out=False) == []

    batch = empty_pack(spec, size, 2, CPU, {"label": [0, 1], "fps": [1.0] * 2})
    settings: dict[str, Any] = {"solver": "euler", "num_steps": 2, "guidance_scale": 1.0, "seed": asked.seed}
    latents = generate(network, FlowMatching(), batch, spec, SamplingConfig(**settings))
    expected = to_bytes(VAE(autoencoders["image"]).decode(latents)[:, :, 0])
    scale = enlargement(*expected.shape[1:3])
    side = expected.shape[1] * scale
    for i, pixels in enumerate(expected):
        left, top = tile_origin(i, 2, side, side, captions=True)
        tile = np.array(grid)[top : top + side : scale, left : left + side : scale]
        assert np.abs(tile.astype(int) - pixels.numpy()).max() <= 1


def test_the_grid_while_training_shows_the_classes_that_have_names(build_model: BuildModel) -> None:
    """A fine-tuned model of 7 classes may be trained on data of 2."""
    model = DiTConfig(hidden_size=32, num_layers=1, num_attention_heads=2, in_channels=3, num_classes=7)
    labels: list[int] = []
    network = build_model(model, perturb=0.1)

    def recording(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        labels.extend(batch.conditions["label"].values.tolist())
        return network(inputs_TC, time_S, batch)

    sampling = SamplingConfig(num_steps=1, guidance_scale=1.0)
    for names, shown in ((["a", "b"], [0, 1]), (None, list(range(7)))):
        labels.clear()
        PictureWriter(model, FlowMatching(), model.batch_spec(), sampling, names).draw(recording, (1, 4, 4), 1.0)
        assert labels == shown


def test_the_layout_does_not_change_the_number_of_redrawn_samples() -> None:
    """Replicas may run smaller micro-batches than `training.micro_batch_size`."""
    model, data = FluxConfig(in_channels=3, patch_spatial=1, control_channels=3), MockData(validation_samples=3)
    training = TrainingConfig(validation_interval=1, micro_batch_size=2)
    config = RunConfig(model=model, data=data, objective=FlowMatching(), training=training)
    batch = held_out_pictures(config, model.batch_spec(micro_batch_size=1), lambda pack: pack)
    assert batch is not None
    assert batch.layout.num_samples == 2


@pytest.mark.parametrize("kind", ["control", "reference"])
def test_a_model_of_pictures_redraws_held_out_samples(kind: str) -> None:
    """The network returns the last picture that it reads, so the second row has these pictures."""
    model = FluxConfig(in_channels=3, patch_spatial=1, control_channels=3 if kind == "control" else None)
    spec, objective = model.batch_spec(), FlowMatching(prediction="x0")
    data = MockData(shapes=["1x4x4"], max_tokens_per_pack=64, validation_samples=3)
    training = TrainingConfig(validation_interval=1)
    config = RunConfig(model=model, data=data, objective=objective, training=training)
    batch = held_out_pictures(config, spec, lambda pack: pack)
    if kind == "control":
        unmeasured = replace(config, training=replace(training, validation_interval=0))
        assert held_out_pictures(unmeasured, spec, lambda pack: pack) is None
        assert batch is not None
        read_TC = batch.conditions["control"].values
    else:
        assert batch is None
        batch = next(data.build_validation(spec, dp_rank=0, dp_size=1))
        read = [[torch.randn(3, 1, 4, 4), torch.randn(3, 1, 4, 4)] for _ in batch.grids]
        batch = add_references(batch, read, spec)
        last = [patchify(x, *spec.patch)[0].repeat(3, 1) for _, x in read]
        read_TC = batch.layout.insert_padding(torch.cat(last))

    def network(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        if kind == "control":
            return batch.conditions["control"].values
        last = [x.chunk(3)[2].repeat(3, 1) for x in inputs_TC.split(list(batch.layout.lengths))]
        return batch.layout.insert_padding(torch.cat(last))

    sampling = SamplingConfig(num_steps=2, guidance_scale=1.0)
    (grid,) = PictureWriter(model, objective, spec, sampling, None).redraw(network, batch)
    rows = [*batch.unpatchified(batch.latents_TC, *spec.patch), *batch.unpatchified(read_TC, *spec.patch)]
    (expected,) = clip_grid(torch.stack(rows), ["held out"] * 3 + ["drawn"] * 3, 3)
    assert np.abs(np.array(grid).astype(int) - np.array(expected)).max() <= 1


def test_stills_of_a_patch_of_two_frames_are_drawn_as_one(build_model: BuildModel) -> None:
    model = DiTConfig(hidden_size=32, num_layers=1, num_attention_heads=2, in_channels=3, patch_temporal=2)
    spec, sampling = model.batch_spec(), SamplingConfig(num_steps=1, guidance_scale=1.0)
    writer, network = PictureWriter(model, FlowMatching(), spec, sampling, None), build_model(model, perturb=0.1)
    assert [len(writer.draw(network, (frames, 4, 4), 1.0)) for frames in (1, 2)] == [1, 2]
    held_out = empty_pack(spec, (2, 4, 4), 2, CPU)
    assert len(writer.redraw(network, held_out)) == 1
    held_out.latents_TC = torch.randn_like(held_out.latents_TC)
    assert len(writer.redraw(network, held_out)) == 2


def test_redrawn_clips_play_at_their_own_rate(build_model: BuildModel, tmp_path: Path) -> None:
    model = DiTConfig(hidden_size=32, num_layers=1, num_attention_heads=2, in_channels=3)
    spec, sampling = model.batch_spec(), SamplingConfig(num_steps=1, guidance_scale=1.0)
    held_out = empty_pack(spec, (2, 4, 4), 2, CPU, {"fps": [5.0, 5.0]})
    writer = PictureWriter(model, FlowMatching(), spec, sampling, None)
    paths = writer.write(build_model(model, perturb=0.1), (9, 8, 8), 30.0, tmp_path, held_out=held_out)
    with Image.open(paths["samples"]) as film:
        assert (film.n_frames, film.info["duration"]) == (2, 200)
