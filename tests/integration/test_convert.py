"""Weights are imported, trained with tensor parallelism and exported; conversions do not change a bit."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dit.models.dit.config import DiTConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from tests.integration import actions
from tests.integration.runs import checkpoint, mock, read_tensors
from tests.parity.public_dit import random_state
from tests.support.ranks import Job, call, run_jobs

pytestmark = pytest.mark.slow

SIZES = {"size": 48, "depth": 2, "inner": 192, "channels": 4, "patch": 2, "classes": 5, "grid": 4}
TINY = {
    "model__hidden_size": 48,
    "model__num_layers": 2,
    "model__num_attention_heads": 4,
    "model__in_channels": 4,
    "model__patch_spatial": 2,
    "model__num_classes": 5,
    "model__context_size": None,
    "model__position_embedding": "sincos_2d",
    "schedule__warmup_steps": 0,
    "schedule__min_lr": 0.0,
}
CLASS_DIT = DiTConfig(hidden_size=48, num_layers=2, num_attention_heads=4, in_channels=4, num_classes=5)
RUNS = [
    ("flow", CLASS_DIT, FlowMatching(prediction="x0", time_shift=2.0)),
    ("edm", CLASS_DIT, EDM(sigma_data=0.7, sigma_max=20.0)),
    ("ddpm", CLASS_DIT, DDPM(schedule="cosine", prediction="v", discrete_steps=50)),
]
SHORT = {"labels": [1], "num_steps": 3}
SMALL, LEARNED = {**SHORT, "variance": "small"}, {**SHORT, "variance": "learned"}
NAMES = ["alpha", "beta", "gamma", "delta", "epsilon"]
TINY_STEP = 1e-7  # one step of Adam moves a weight by at most the learning rate, 1e-9


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, torch.Tensor]:
    """A published state dict with a learned variance, saved as safetensors and as a training checkpoint."""
    state = random_state(**SIZES, out_channels=8)
    save_file(state, folder / "theirs.safetensors")
    torch.save({"ema": state, "model": {}, "step": 7}, folder / "theirs.pt")
    return state


@pytest.fixture(scope="module")
def done(folder: Path, theirs: dict[str, torch.Tensor]) -> dict[str, Any]:
    def take_in(file: str, out: str, *words: str) -> Job:
        given = ("--from", folder / file, "--format", "dit", "--num-attention-heads", 4, "--out", folder / out, *words)
        return call(actions.import_weights, *given)

    def put_out(run: str, kind: str, out: str, *words: str) -> Job:
        return call(actions.export, "--checkpoint", folder / run, "--format", kind, "--out", folder / out, *words)

    started = mock(
        folder / "run",
        **TINY,
        checkpoint__start_from=folder / "mean",
        training__num_steps=1,
        optimizer__lr=1e-9,
        parallel__tensor_model_parallel_size=2,
        parallel__sequence_parallel=True,
    )
    trained_on = mock(
        folder / "learned",
        **TINY,
        objective="ddpm_learned_variance",
        model__out_channels=8,
        checkpoint__start_from=folder / "imported",
        training__num_steps=1,
        optimizer__lr=1e-9,
    )
    jobs = {
        "import": take_in("theirs.safetensors", "imported"),
        "import mean": take_in("theirs.pt", "mean", "--drop-variance"),
        "draw": call(
            actions.draw,
            *("--checkpoint", folder / "imported", "--steps", 3, "--labels", "1,3", "--out", folder / "x.png"),
        ),
        "latents": Job(actions.sample, {"run_dir": folder / "imported", "requests": [SMALL, LEARNED, SHORT]}),
        "mean latents": Job(actions.sample, {"run_dir": folder / "mean", "requests": [SMALL]}),
        "resume": call(actions.train, *mock(folder / "mean", **TINY, training__num_steps=1)),
        "start": call(actions.train, *started, ranks=2),
        "go on": call(actions.train, *trained_on),
        "learned": put_out("learned", "dit", "learned.safetensors", "--raw-weights"),
        "back": put_out("imported", "dit", "back.pt"),
        "raw": put_out("run", "dit", "raw.safetensors", "--raw-weights"),
        "diffusers": put_out("run", "diffusers", "diffusers"),
        "reimport": call(
            actions.import_weights,
            *("--from", folder / "diffusers", "--format", "diffusers", "--out", folder / "reimported"),
        ),
        "no average": put_out("plain", "diffusers", "none"),
    }
    for name, model, objective in RUNS:
        run = f"made/{name}"
        jobs[run] = Job(
            actions.make_run, {"run_dir": folder / run, "model": model, "objective": objective, "class_names": NAMES}
        )
        for kind, file in (("diffusers", f"{name}_folder"), ("dit", f"{name}.safetensors")):
            back = folder / f"{run}_{kind}"
            jobs[f"{name} to {kind}"] = put_out(run, kind, file)
            words = ("--from", folder / file, "--format", kind, "--out", back)
            jobs[f"{name} from {kind}"] = call(actions.import_weights, *words)
    sampled = [folder / f"made/{name}{end}" for name, *_ in RUNS for end in ("", "_diffusers", "_dit")]
    for run in (*sampled, folder / "run", folder / "reimported"):
        jobs[f"latents of {run}"] = Job(actions.sample, {"run_dir": run, "requests": [{"labels": [0, 4]}]})
    jobs["by name"] = call(
        actions.draw, *("--checkpoint", sampled[1], "--labels", "delta", "--out", folder / "delta.png")
    )
    plain = mock(folder / "plain", **TINY, training__num_steps=1, training__ema_decay="None")
    return run_jobs(folder / "jobs", {"plain": call(actions.train, *plain), **jobs})


def test_imported_weights_are_exported_unchanged(done: dict, folder: Path, theirs: dict):
    assert done["import"].code == done["back"].code == 0
    back = torch.load(folder / "back.pt", weights_only=True)
    assert back.keys() == theirs.keys()
    torch.testing.assert_close(back.pop("pos_embed"), theirs["pos_embed"], rtol=0, atol=1e-6)
    for name, tensor in back.items():
        assert torch.equal(tensor, theirs[name]), name


def test_imported_weights_are_sampled_with_or_without_their_variance(done: dict, folder: Path):
    """Dropping the variance does not change the mean; by default, a run samples with the learned variance."""
    assert done["draw"].code == 0, done["draw"].err
    assert (folder / "x.png").is_file()
    (_, [small, learned, own]), (_, [without]) = done["latents"], done["mean latents"]
    assert small.shape == (1, 4, 1, 8, 8)
    assert torch.equal(small, without)
    assert torch.equal(learned, own)
    assert (learned - small).abs().max() > 1e-3


def test_a_run_trains_on_with_their_variance(done: dict, folder: Path, theirs: dict):
    """After one tiny step, the head still has the imported rows of the variance."""
    assert done["go on"].code == 0, done["go on"].err
    found = load_file(folder / "learned.safetensors")["final_layer.linear.weight"]
    torch.testing.assert_close(found, theirs["final_layer.linear.weight"], rtol=0, atol=TINY_STEP)


def test_a_tensor_parallel_run_starts_from_them(done: dict, folder: Path, theirs: dict):
    """After one tiny step on two ranks, all weights are still the imported ones; the head has only the mean."""
    assert all(ended.code == 0 for ended in done["start"]), done["start"]
    found = load_file(folder / "raw.safetensors")
    assert found.keys() == theirs.keys()
    assert found.pop("pos_embed").shape == (1, 64, 48)  # computed for the 16 x 16 latents of the run
    for name, tensor in found.items():
        expected = theirs[name]
        if name.startswith("final_layer.linear"):
            expected = expected.unflatten(0, (4, 8))[:, :4].flatten(0, 1)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=TINY_STEP)


def test_a_run_survives_a_round_trip_through_diffusers(done: dict, folder: Path):
    """A run's average, exported and imported, has the same bits; a difference in the time embedding is reported."""
    assert done["diffusers"].code == done["reimport"].code == 0
    assert "time_frequency_shift=0" in done["diffusers"].err
    average = {
        n.removeprefix("ema."): x for n, x in read_tensors(checkpoint(folder / "run", 1)).items() if n[:4] == "ema."
    }
    again = {n.removeprefix("weight."): x for n, x in read_tensors(checkpoint(folder / "reimported", 0)).items()}
    assert again.keys() == average.keys()
    for name, tensor in average.items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("kind", ["diffusers", "dit"])
@pytest.mark.parametrize("name", [name for name, *_ in RUNS])
def test_a_reimported_run_draws_the_samples_of_the_run(done: dict, folder: Path, name: str, kind: str):
    """Objective, sampling defaults, latent size, names and time frequencies return, so samples have the same bits."""
    run, back = folder / f"made/{name}", folder / f"made/{name}_{kind}"
    assert done[f"{name} to {kind}"].code == done[f"{name} from {kind}"].code == 0
    (_, [expected]), (_, [found]) = done[f"latents of {run}"], done[f"latents of {back}"]
    assert expected.shape == (2, 4, 1, 8, 8)
    assert torch.equal(found, expected)
    assert (expected[0] - expected[1]).abs().max() > 0.01  # classes differ
    records = [checkpoint(one, 0) / "metadata.json" for one in (run, back)]
    assert len({path.read_text() for path in records}) == 1
    [(_, _, objective)] = [one for one in RUNS if one[0] == name]
    assert f"read objective: {objective} (recorded with the weights)" in done[f"{name} from {kind}"].err


def test_the_objectives_draw_different_samples(done: dict, folder: Path):
    """Otherwise equal samples would not show that the objective was restored."""
    latents = [done[f"latents of {folder / 'made' / name}"][1][0] for name, *_ in RUNS]
    assert all((a - b).abs().max() > 0.01 for a, b in combinations(latents, 2))


def test_a_trained_run_draws_the_same_samples_after_a_round_trip_through_diffusers(done: dict, folder: Path):
    (_, [expected]), (_, [found]) = (done[f"latents of {folder / run}"] for run in ("run", "reimported"))
    assert expected.abs().max() > 0.01
    assert torch.equal(found, expected)


def test_classes_keep_their_names(done: dict, folder: Path):
    assert done["by name"].code == 0
    assert (folder / "delta.png").is_file()
    assert "read 5 class names" in done["flow from dit"].err


def test_imported_weights_are_not_resumed(done: dict):
    assert done["resume"].code == 2
    assert "checkpoint.start_from" in done["resume"].err


def test_a_run_without_an_average_is_reported(done: dict, folder: Path):
    assert done["no average"].code == 5
    assert "raw weights" in done["no average"].err
    assert not (folder / "none").exists()
