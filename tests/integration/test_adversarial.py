"""The adversarial loss in runs: it starts at its step, also after a resume, and exported weights do not contain it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dit.errors import EXIT_OK, EXIT_PREEMPTED
from tests.integration import actions
from tests.integration.runs import SLOTS, checkpoint, read_tensors, scalars, training
from tests.support.ranks import Job, call, run_jobs

pytestmark = pytest.mark.slow

START, STEPS = 3, 6
SETTINGS: dict[str, Any] = {
    "data": "mock",
    "data__height": 32,
    "data__width": 32,
    "model__block_out_channels": "[8,8,8,8]",
    "model__norm_num_groups": 2,
    "model__latent_channels": 4,
    "schedule__warmup_steps": 0,
    "training__micro_batch_size": 2,
    "training__global_batch_size": 4,
    "training__num_steps": STEPS,
    "training__log_interval": 1,
    "training__ema_decay": 0.5,
    "checkpoint__interval": START - 1,
    "checkpoint__keep_last": STEPS,
    "logging__tensorboard": False,
}
ADVERSARIAL = {"objective__adversarial": f"adversarial(num_layers=2,hidden_size=8,start_step={START})"}
NEW = {"objective__adversarial": "adversarial(num_layers=2,hidden_size=8,start_step=0)"}
UNTRAINED = "checkpoint.start_from loads only the autoencoder; the discriminator starts untrained"


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    def run(name: str, **settings: Any) -> Job:
        return training("pictogram_autoencoder", folder / name, **{**SETTINGS, **settings})

    exported = ["--checkpoint", folder / "full", "--format", "diffusers", "--out", folder / "vae"]
    jobs = {
        "full": run("full", **ADVERSARIAL),
        "stopped": run("stopped", **ADVERSARIAL, training__stop_at_step=START - 1),
        "again": run("stopped", **ADVERSARIAL),
        "before": run("before", **ADVERSARIAL, training__num_steps=START - 1),
        "fp16": run("fp16", **ADVERSARIAL, training__precision="fp16", training__initial_loss_scale=1024.0),
        "export": call(actions.export, *exported),
        "next": run("next", training__num_steps=1, checkpoint__start_from=folder / "full"),
        "again trained": run("new", **NEW, training__num_steps=1, checkpoint__start_from=folder / "full"),
    }
    return run_jobs(folder / "world", jobs)


def test_every_run_succeeds(done: dict[str, Any]) -> None:
    codes = {name: ended.code for name, ended in done.items()}
    assert codes == {**dict.fromkeys(done, EXIT_OK), "stopped": EXIT_PREEMPTED}, done


def test_the_terms_start_at_their_step(done: dict[str, Any], folder: Path) -> None:
    """Also in fp16. A run that ends before that step does not report that the discriminator had no gradient."""
    for name in ("full", "fp16"):
        for term in ("generator", "discriminator"):
            values = scalars(folder / name, f"loss_{term}")
            assert [values[step] != 0 for step in range(1, STEPS + 1)] == [step > START for step in range(1, STEPS + 1)]
        assert all(value > 0 for value in scalars(folder / name, "loss_adaptive_weight").values())
    for name in ("full", "before"):
        assert re.search(r"first steps: all \d+ parameters have a gradient", done[name].out + done[name].err), name


def test_a_new_run_reports_that_it_does_not_load_the_discriminator(done: dict[str, Any], folder: Path) -> None:
    parts = re.split(r"^--- (.*)$", (folder / "world" / "rank_0.log").read_text(), flags=re.MULTILINE)
    logs = dict(zip(parts[1::2], parts[2::2]))
    assert {name: log.count(UNTRAINED) for name, log in logs.items()} == {**dict.fromkeys(done, 0), "again trained": 1}
    new, old = (read_tensors(checkpoint(folder / name, step)) for name, step in (("new", 1), ("full", STEPS)))
    assert new.keys() == old.keys()
    assert not torch.equal(new["ema.discriminator.first.weight"], old["ema.discriminator.first.weight"])


def test_a_resume_before_the_start_changes_no_bit(done: dict[str, Any], folder: Path) -> None:
    """The weights, average and Adam's state of both networks stay the same."""
    full, again = (read_tensors(checkpoint(folder / name, STEPS)) for name in ("full", "stopped"))
    assert full.keys() == again.keys()
    for slot in SLOTS:
        assert f"{slot}.discriminator.first.weight" in full
    for name, tensor in full.items():
        assert torch.equal(tensor, again[name]), name
    before = read_tensors(checkpoint(folder / "stopped", START - 1))
    assert not before["exp_avg.discriminator.first.weight"].any()
    assert full["exp_avg.discriminator.first.weight"].any()


def test_exported_weights_load_in_diffusers_without_the_discriminator(done: dict[str, Any], folder: Path) -> None:
    from diffusers import AutoencoderKL

    module, report = AutoencoderKL.from_pretrained(folder / "vae", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    average = read_tensors(checkpoint(folder / "full", STEPS))["ema.to_pixels.conv_out.weight"]
    assert torch.equal(module.decoder.conv_out.weight, average)
    assert "discriminator" not in json.dumps(json.loads((folder / "vae" / "config.json").read_text()))
