"""Output of a latent run: pictures decoded during training and on command, and metrics; the same on two ranks."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dit.encoders.vae import VAE
from dit.sampling.grid import to_bytes
from tests.integration import actions
from tests.integration.runs import mock, read_records, scalars
from tests.support.ranks import call, run_jobs
from tests.unit.encoders.test_vae import MODELS

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "model__in_channels": 4,
    "model__num_classes": 3,
    "model__context_size": None,
    "data__shapes": '["1x8x8","1x4x8"]',
    "data__validation_samples": 3,
    "objective": "flow_matching",
    "training__num_steps": 4,
    "training__sample_interval": 4,
    "training__validation_interval": 4,
    "training__precision": "fp32",
    "training__ema_decay": None,
    "sampling__num_steps": 2,
    "schedule__warmup_steps": 0,
}
DRAWN = ("--labels", "0,1,2", "--count", "2", "--steps", "2", "--batch", "2", "--raw-weights")
METRICS = ("loss", "fid", "kid")


class Colours(torch.nn.Module):
    """Features of a picture: mean and standard deviation of each colour."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels = images.float() / 255
        return torch.cat([pixels.mean((2, 3)), pixels.flatten(2).std(2)], 1)


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    kind, config = MODELS["image"]
    torch.manual_seed(0)
    kind(**config).save_pretrained(folder / "vae")
    torch.jit.script(Colours()).save(str(folder / "colours.pt"))
    (folder / "run").mkdir()  # the second rank checks for the folder at once, before it waits for the first rank
    run = mock(folder / "run", **SETTINGS, sampling__vae=os.path.relpath(folder / "vae"))
    jobs = {"train": call(actions.train, *run)}
    for ranks in (1, 2):
        where = folder / f"on {ranks}"
        files = ("--files", where, "--save-latents", where / "x.safetensors", "--out", where / "x.png")
        jobs[f"draw on {ranks}"] = call(actions.draw, "--checkpoint", folder / "run", *DRAWN, *files, ranks=ranks)
        for metric in METRICS:
            words = ["--checkpoint", folder / "run", "--metric", metric, "--raw-weights", "--json"]
            if metric != "loss":
                words += ["--features", folder / "colours.pt", "--steps", 2]
            jobs[f"{metric} on {ranks}"] = call(actions.evaluate, *words, ranks=ranks)
    large = ("--checkpoint", folder / "run", *DRAWN, "--size", "64x48", "--labels", "1", "--out", folder / "large.png")
    jobs["large"] = call(actions.draw, *large)
    found = run_jobs(folder / "world", jobs)
    for name, ended in found.items():
        assert {one.code for one in (ended if isinstance(ended, list) else [ended])} == {0}, (name, ended)
    return found


def test_pictures_are_the_decoded_latents_and_the_same_on_two_ranks(done: dict[str, Any], folder: Path) -> None:
    """Files, grid and latents are equal to the byte; each file is the decoded latent."""
    one, two = (folder / f"on {ranks}" for ranks in (1, 2))
    names = sorted(path.name for path in one.iterdir())
    assert names == [*(f"{i:06d}.png" for i in range(6)), "samples.jsonl", "x.png", "x.safetensors"]
    assert actions.contents(one) == actions.contents(two)
    latents = load_file(one / "x.safetensors")["latents"]
    assert tuple(latents.shape) == (6, 4, 1, 8, 8)
    expected = to_bytes(VAE(str(folder / "vae")).decode(latents)[:, :, 0])
    records = [json.loads(line) for line in (one / "samples.jsonl").read_text().splitlines()]
    assert [(record["class"], record["number"]) for record in records] == [(str(i // 2), i) for i in range(6)]
    for record, pixels in zip(records, expected):
        with Image.open(one / record["file"]) as image:
            assert np.abs(np.array(image).astype(int) - pixels.numpy()).max() <= 1
    assert "6 samples" in done["draw on 1"].out
    assert done["draw on 2"][1].out == ""


def test_a_run_records_its_autoencoder_and_decodes_its_pictures(done: dict[str, Any], folder: Path) -> None:
    """The record of a relative path is absolute, for commands in other folders; no message mentions false colours.

    The grid has the size of decoded samples (32 pixels, enlarged to 64).
    """
    metadata = json.loads(next((folder / "run").rglob("metadata.json")).read_text())
    assert metadata["autoencoder"] == str(folder / "vae")
    assert "false colours" not in done["train"].out + done["train"].err
    (record,) = (r for r in read_records(folder / "run" / "metrics.jsonl") if r["kind"] == "image")
    with Image.open(record["path"]) as grid:
        assert grid.size[0] == 3 * (64 + 4) + 4


def test_a_size_is_drawn_in_pixels(done: dict[str, Any], folder: Path) -> None:
    """The grid has two samples of 64 x 48 pixels in a row, enlarged until the shorter side has at least 64."""
    with Image.open(folder / "large.png") as image:
        assert image.size == (2 * (96 + 4) + 4, 128 + 16 + 2 * 4)


def test_the_loss_equals_that_of_the_run(done: dict[str, Any], folder: Path) -> None:
    """The evaluated loss equals the run's last validation, which had the same weights, data, noise and precision."""
    found = json.loads(done["loss on 1"].out)
    (recorded,) = scalars(folder / "run", "held_out/loss").values()
    assert found["loss"] == pytest.approx(recorded, rel=1e-6)
    assert set(found["by_time"]) <= {f"{i}/8" for i in range(8)}


@pytest.mark.parametrize("metric", METRICS)
def test_several_ranks_measure_the_loss_of_one_rank(done: dict[str, Any], metric: str) -> None:
    """Although the two ranks have different numbers of micro-batches, of two sizes."""
    one, (two, silent) = json.loads(done[f"{metric} on 1"].out), done[f"{metric} on 2"]
    assert silent.out == ""
    two = json.loads(two.out)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert two[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5)), name
    if metric != "loss":
        assert one["pictures"] > 2
        assert one[metric] > 0
