"""One override trains the letters recipe with any objective, and samples are drawn from the trained model."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration import actions
from tests.integration.runs import checkpoint, letters, loss_values, mock, read_tensors, scalars, training
from tests.support.ranks import Job, call, run_jobs

OBJECTIVES = ["edm", "ddpm", "flow_matching"]
NUM_STEPS = 36
LABELS = [3, 14, 25]
SHORT = {"num_steps": 6, "guidance_scale": 1.5, "seed": 3}
REQUESTS = {
    **{solver: {"labels": LABELS, "solver": solver, **SHORT} for solver in ("euler", "ancestral")},
    "again": {"labels": LABELS, "solver": "ancestral", **SHORT},
    "another seed": {"labels": LABELS, "solver": "ancestral", **SHORT, "seed": 4},
    "alone": {"labels": LABELS[:1], "solver": "ancestral", **SHORT},
    "unguided": {"labels": LABELS, "solver": "euler", **SHORT, "guidance_scale": 1.0},
    "unconditional": {"labels": LABELS, "solver": "euler", **SHORT, "guidance_scale": 0.0},
    "other letters": {"labels": [0, 1, 2], "solver": "euler", **SHORT, "guidance_scale": 0.0},
}


def text(seed: int, length: int) -> torch.Tensor:
    return torch.randn(length, 8, generator=torch.Generator().manual_seed(seed))


TEXTS, OTHERS = [text(0, 3), text(1, 1)], [text(2, 2), text(3, 4)]
TEXT_REQUESTS = {
    "texts": {"conditions": {"context": TEXTS}},
    "no texts": {"count": 2},
    "other texts": {"conditions": {"context": OTHERS}},
    "negative": {"conditions": {"context": TEXTS}, "negative": {"context": OTHERS}},
    "negative of itself": {"conditions": {"context": TEXTS}, "negative": {"context": TEXTS}},
    "unguided": {"conditions": {"context": TEXTS}, "guidance_scale": 1.0},
}


RATE_REQUESTS = {"own rate": {"count": 2}, **{f"{n} per second": {"count": 2, "fps": float(n)} for n in (8, 24)}}


@pytest.fixture(scope="module")
def done(letters_data: Path, folder: Path) -> dict[str, Any]:
    """Short runs with each objective, with text, with a frame rate and without average, and their samples."""
    np.save(folder / "words.npy", TEXTS[0].numpy())
    jobs = {}
    for name in OBJECTIVES:
        settings = {"training__num_steps": NUM_STEPS, "training__validation_interval": 12, "training__ema_decay": 0.9}
        jobs[name] = call(actions.train, *letters(letters_data, folder / name, objective=name, **settings))
        jobs[f"{name} samples"] = Job(actions.sample, {"run_dir": folder / name, "requests": list(REQUESTS.values())})
    raw = {"run_dir": folder / "edm", "requests": [REQUESTS["euler"]], "weights": "raw"}
    jobs["raw"] = Job(actions.sample, raw)
    learn = {"model__context_size": 8, "model__context_dropout": 0.3, "data__text_tokens": 4, "optimizer__lr": 0.01}
    show = {"training__sample_interval": 10, "sampling__num_steps": 4, "training__ema_decay": 0.5}
    jobs["text"] = call(actions.train, *mock(folder / "text", **learn, **show))
    jobs["text samples"] = Job(actions.sample, {"run_dir": folder / "text", "requests": list(TEXT_REQUESTS.values())})
    draw = ["--checkpoint", folder / "text", "--condition", "context", folder / "words.npy", "--count", 2]
    jobs["draw text"] = call(actions.draw, *draw, "--out", folder / "text.png")
    clips = {"optimizer__lr": 0.01, "training__num_steps": 10, "training__ema_decay": 0.5}
    clips |= {"logging__tensorboard": False, "sampling__num_steps": 4}
    jobs["clips"] = training("tiny_dit_cross", folder / "clips", **clips)
    jobs["clips samples"] = Job(actions.sample, {"run_dir": folder / "clips", "requests": list(RATE_REQUESTS.values())})
    plain = mock(folder / "plain", training__num_steps=1, training__ema_decay="none", schedule__warmup_steps=0)
    jobs["plain"] = call(actions.train, *plain)
    draw = ["--checkpoint", folder / "plain", "--steps", 2, "--out", folder / "plain.png"]
    jobs["draw average"] = call(actions.draw, *draw)
    jobs["draw raw"] = call(actions.draw, *draw, "--raw-weights")
    found = run_jobs(folder / "world", jobs)
    assert all(found[name].code == 0 for name in [*OBJECTIVES, "text", "clips", "plain"])
    return found


@pytest.fixture(scope="module")
def drawn(done: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the samples by objective (or "text") and request."""
    asked = {**dict.fromkeys(OBJECTIVES, REQUESTS), "text": TEXT_REQUESTS, "clips": RATE_REQUESTS}
    return {name: dict(zip(requests, done[f"{name} samples"][1], strict=True)) for name, requests in asked.items()}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_override_trains_letters_by_another_objective(done: dict[str, Any], folder: Path, name: str) -> None:
    """The loss falls on the training data and on held-out font families."""
    losses = loss_values(folder / name)
    assert len(losses) == NUM_STEPS
    assert statistics.mean(losses[-10:]) < 0.95 * statistics.mean(losses[:10])
    held_out = list(scalars(folder / name, "held_out/loss").values())
    assert held_out == sorted(held_out, reverse=True)
    assert len(set(held_out)) == 3
    assert f"objective   {name.replace('_', '')}(" in done[name].out.lower()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_seed_addresses_the_noise_of_each_sample(drawn: dict, name: str) -> None:
    """A seed gives the same latents to the bit, another seed gives others; the other samples do not matter."""
    found = drawn[name]
    assert torch.equal(found["again"], found["ancestral"])
    assert distance(found["another seed"], found["ancestral"]) > 0.1
    assert found["alone"][0] == pytest.approx(found["ancestral"][0], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_guidance_scales_between_unconditional_and_conditional(drawn: dict, name: str) -> None:
    """At scale 0 the labels have no effect; at 1 they have one, and at 1.5 a larger one."""
    found = drawn[name]
    assert found["unconditional"] == pytest.approx(found["other letters"], rel=1e-4, abs=1e-4)
    away = distance(found["unguided"], found["unconditional"])
    assert 0 < away < distance(found["euler"], found["unconditional"])


def test_samples_are_drawn_from_the_average(done: dict[str, Any], drawn: dict, folder: Path) -> None:
    stored = read_tensors(checkpoint(folder / "edm", NUM_STEPS))
    (average, _), (raw, raw_samples) = done["edm samples"], done["raw"]
    for name in average:
        assert torch.equal(average[name], stored[f"ema.{name}"])
        assert torch.equal(raw[name], stored[f"weight.{name}"])
    assert any(not torch.equal(average[name], raw[name]) for name in raw)
    assert distance(raw_samples[0], drawn["edm"]["euler"]) > 1e-3


def test_a_missing_average_is_reported(done: dict[str, Any], folder: Path) -> None:
    assert done["draw average"].code == 5
    assert "no weight average" in done["draw average"].err
    assert done["draw raw"].code == 0
    assert (folder / "plain.png").is_file()


def test_samples_follow_the_text_and_avoid_the_negative_text(drawn: dict) -> None:
    """If both texts are equal, guidance has no effect; with another negative text it has one."""
    found = drawn["text"]
    for name in ("no texts", "other texts", "negative", "unguided"):
        assert distance(found[name], found["texts"]) > 1e-4, name
    assert found["negative of itself"] == pytest.approx(found["unguided"], rel=1e-4, abs=1e-4)
    assert distance(found["negative"], found["unguided"]) > 1e-4


def test_clips_are_drawn_at_the_frame_rate_of_the_training_data(drawn: dict) -> None:
    """The model is conditioned on the frame rate, and trained on clips of 24 frames per second and on images."""
    found = drawn["clips"]
    assert found["own rate"].shape[2] > 1
    assert torch.equal(found["own rate"], found["24 per second"])
    assert distance(found["8 per second"], found["own rate"]) > 1e-4


def test_a_text_model_shows_samples_while_it_trains_and_on_command(done: dict[str, Any], folder: Path) -> None:
    shown = sorted(p.parent.name for p in (folder / "text" / "samples").rglob("ema.png"))
    assert shown == ["step_0000010", "step_0000020"]
    assert done["draw text"].code == 0
    assert "2 samples" in done["draw text"].out
    assert (folder / "text.png").is_file()
