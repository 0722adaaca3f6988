"""Pictograms end to end: train and export an autoencoder, train a model on its latents, and evaluate samples."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dit.batch import pixel_values
from dit.convert.diffusers_autoencoder import DiffusersAutoencoder
from dit.convert.state_files import CONFIG, read_json
from dit.encoders.vae import VAE
from dit.errors import EXIT_DATA, EXIT_OK
from energon_data.media_files import pixels_of
from examples.pictograms.drawings import ATTRIBUTION, choose_pictograms, draw
from tests.integration import actions
from tests.integration.runs import checkpoint, loss_values, read_tensors, scalars, training
from tests.parity.convert_cases import assert_same_bits
from tests.support.ranks import Job, call, run_jobs

pytestmark = pytest.mark.slow

SIZE, COUNT, STEPS = 32, 8, 12
DATA = ["pictograms", "--size", str(SIZE), "--blocks", "transport", "--count", str(COUNT), "--processes", "1"]
TRAINING: dict[str, Any] = {
    "training__micro_batch_size": 4,
    "training__global_batch_size": 8,
    "training__num_steps": STEPS,
    "training__log_interval": 1,
    "checkpoint__interval": STEPS,
    "logging__tensorboard": False,
}
ROUNDING = 1e-5  # relative, fp32
SHUFFLED = 0.02  # of a standard deviation of 1: the shuffle buffer returns some drawings more than once


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    def run(factory: str, name: str, **settings: Any) -> Job:
        return training(factory, folder / name, **{**TRAINING, **settings})

    autoencoder = {
        "data__path": folder / "pixels",
        "data__background": False,
        "model__block_out_channels": "[8,8,8,8]",
        "model__latent_channels": 4,
        "model__norm_num_groups": 2,
        "schedule__warmup_steps": 0,
    }
    vq = {
        **{name: value for name, value in autoencoder.items() if name.startswith(("data", "schedule"))},
        "model__block_out_channels": "[8,8,8]",
        "model__norm_num_groups": 2,
    }
    latent = {
        "data__path": folder / "latents",
        "data__background": False,
        "model__in_channels": 4,
        "model__num_layers": 1,
        "model__hidden_size": 32,
        "model__num_attention_heads": 2,
        "training__num_steps": 2,
        "schedule__warmup_steps": 0,
    }
    encoders = ["--vae", folder / "vae", "--text-encoder", "all-minilm-l6-v2"]
    sampled = ["--checkpoint", folder / "latent"]

    def converted(name: str, vae: str, again: str) -> tuple[Job, Job]:
        exported = ["--checkpoint", folder / name, "--format", "diffusers", "--out", folder / vae]
        imported = ["--from", folder / vae, "--format", "diffusers", "--out", folder / again]
        return call(actions.export, *exported), call(actions.import_weights, *imported)

    to_kl, from_kl = converted("autoencoder", "vae", "again")
    to_vq, from_vq = converted("vq", "vq_vae", "vq_again")
    jobs = {
        "draw": call(actions.prepare, *DATA, "--out", folder / "pixels"),
        "autoencoder": run("pictogram_autoencoder", "autoencoder", **autoencoder),
        "export": to_kl,
        "import": from_kl,
        "vq": run("pictogram_vq_autoencoder", "vq", **vq),
        "export vq": to_vq,
        "import vq": from_vq,
        "encode": call(actions.prepare, *DATA, *encoders, "--out", folder / "latents"),
        "latent": run("pictograms_latent", "latent", **latent),
        "judge": call(
            actions.evaluate,
            *(*sampled, "--metric", "pictograms", "--steps", 2, "--out", folder / "drawn.png", "--json"),
        ),
        "shown": call(actions.draw, *sampled, "--prompt", "rocket", "--steps", 1, "--out", folder / "rocket.png"),
        "letters": call(actions.evaluate, *sampled, "--metric", "letters"),
    }
    return run_jobs(folder / "world", jobs)


def test_every_command_succeeds(done: dict[str, Any], folder: Path) -> None:
    codes = {name: ended.code for name, ended in done.items()}
    assert codes.pop("letters") == EXIT_DATA
    assert "which letters have; choose another --metric" in done["letters"].err
    assert set(codes.values()) == {EXIT_OK}, done
    assert ATTRIBUTION in done["draw"].out
    assert f"trained on {ATTRIBUTION}" in done["shown"].out
    assert "README.md says how to encode and decode with diffusers" in done["export"].out + done["export"].err
    assert f"export it: python -m launch.export --checkpoint {folder / 'autoencoder'}" in done["autoencoder"].out


@pytest.mark.parametrize(("run", "terms"), [("autoencoder", ("kl",)), ("vq", ("codebook", "commitment"))])
def test_the_autoencoder_learns_and_logs_its_terms(
    done: dict[str, Any], folder: Path, run: str, terms: tuple[str, ...]
) -> None:
    losses = loss_values(folder / run)
    assert losses[-1] < 0.8 * losses[0]
    parts = [scalars(folder / run, f"loss_{name}") for name in ("error", *terms)]
    assert [sum(values) for values in zip(*(part.values() for part in parts))] == pytest.approx(losses, rel=ROUNDING)


def drawings() -> torch.Tensor:
    chosen = choose_pictograms(["transport"], COUNT)
    return torch.stack([pixel_values(pixels_of([draw(p.code_point, SIZE)])) for p in chosen])


def test_the_exported_latents_have_mean_zero_and_deviation_one(done: dict[str, Any], folder: Path) -> None:
    """The encoded drawings are those of the data set."""
    latents = VAE(str(folder / "vae")).encode(drawings())
    assert latents.shape == (COUNT, 4, 1, SIZE // 8, SIZE // 8)
    assert latents.mean().item() == pytest.approx(0.0, abs=SHUFFLED)
    assert latents.std(correction=0).item() == pytest.approx(1.0, abs=SHUFFLED)


def test_vq_latents_are_scaled_before_quantisation(done: dict[str, Any], folder: Path) -> None:
    latents = VAE(str(folder / "vq_vae")).encode(drawings())
    assert latents.shape == (COUNT, 4, 1, SIZE // 4, SIZE // 4)
    assert latents.std(correction=0).item() == pytest.approx(1.0, abs=SHUFFLED)
    assert "z * scaling_factor, z = `VQModel" in (folder / "vq_vae" / "README.md").read_text()


@pytest.mark.parametrize(("again", "run"), [("again", "autoencoder"), ("vq_again", "vq")])
def test_import_restores_the_exported_weights(done: dict[str, Any], folder: Path, again: str, run: str) -> None:
    imported, trained = read_tensors(checkpoint(folder / again, 0)), read_tensors(checkpoint(folder / run, STEPS))
    average = {name.removeprefix("ema."): x for name, x in trained.items() if name.startswith("ema.")}
    assert_same_bits({name.removeprefix("weight."): x for name, x in imported.items()}, average)


def test_import_restores_the_exported_settings(done: dict[str, Any], folder: Path) -> None:
    settings = read_json(folder / "vae" / CONFIG)
    model = DiffusersAutoencoder().read_settings(settings).model
    assert (model.scaling_factor, model.shift_factor) == (settings["scaling_factor"], settings["shift_factor"])
    assert model.block_out_channels == [8, 8, 8, 8]
    assert "(z - shift_factor) * scaling_factor" in (folder / "vae" / "README.md").read_text()


def test_the_model_trains_on_latents_and_names(done: dict[str, Any], folder: Path) -> None:
    from tests.unit.energon_data.preparations import samples

    expected = VAE(str(folder / "vae")).encode(drawings())
    for (_, metadata, clip, _), latent, pictogram in zip(
        samples(folder / "latents"), expected, choose_pictograms(["transport"], COUNT), strict=True
    ):
        torch.testing.assert_close(clip.latent, latent, rtol=1e-3, atol=1e-3)  # stored as float16
        assert metadata["caption"] == pictogram.name


def test_samples_are_ranked_with_reconstructions_of_the_autoencoder(done: dict[str, Any], folder: Path) -> None:
    found = json.loads(done["judge"].out)
    assert (found["prompts"], found["pictograms"]) == (COUNT, COUNT)
    assert found["samples"]["first_20"] == 1.0  # there are only 8
    assert 0 < found["autoencoder"]["error"] < found["samples"]["error"]
    assert found["attribution"] == ATTRIBUTION
    assert (folder / "drawn.png").stat().st_size > 0
