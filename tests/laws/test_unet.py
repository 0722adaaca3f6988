"""A backbone outside the packages: training, resuming, sampling, training on two ranks, and errors.

Its row in `backbones.py` compares every gradient.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dit.config_record import TRUST_VARIABLE
from dit.errors import EXIT_CHECKPOINT, EXIT_CONFIG, EXIT_OK, EXIT_PREEMPTED, ConfigError
from launch import config_file
from launch.train import call_recipe
from launch.train import main as launch_train
from tests.conftest import BuildModel
from tests.integration import actions
from tests.integration.runs import assert_same_bits, checkpoint, loss_values, read_tensors, training
from tests.laws.backbones import pack
from tests.laws.trial_unet import UNet
from tests.support import faults
from tests.support.ranks import call, run_jobs

FACTORY = "tests.laws.trial_unet.trial_unet"
NUM_STEPS, STOP = 6, 3
ROUNDING = 1e-5  # relative error, fp32; another order of sums
FALLS = 0.95
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {}),
    "stopped": (1, {"training__stop_at_step": STOP}),
    "fsdp2": (2, {"parallel__data_parallel": "fsdp"}),
}


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """Results of all runs, of one resumed run, and of sampling."""

    usual = {"training__num_steps": NUM_STEPS, "schedule__warmup_steps": 2, "checkpoint__interval": NUM_STEPS}
    usual |= {"logging__tensorboard": False, "training__validation_interval": NUM_STEPS}
    jobs = {name: training(FACTORY, folder / name, ranks, **usual, **s) for name, (ranks, s) in RUNS.items()}
    jobs["resumed"] = training(FACTORY, folder / "stopped", **usual)
    draw = ["--checkpoint", folder / "whole", "--labels", "1,7", "--steps", 2, "--guidance-scale", 1.5]
    draw += ["--out", folder / "drawn.png"]
    jobs["drawn"] = call(actions.draw, *draw, fault=partial(faults.trusting, "tests"))
    jobs["not trusted"] = call(actions.draw, *draw)
    return run_jobs(folder / "world", jobs)


@pytest.mark.parametrize("name", [*RUNS, "resumed", "drawn"])
def test_training_succeeds(done: dict[str, Any], name: str) -> None:
    ended = done[name] if isinstance(done[name], list) else [done[name]]
    assert {e.code for e in ended} == {EXIT_PREEMPTED if name == "stopped" else EXIT_OK}, ended


def test_the_loss_falls(done: dict[str, Any], folder: Path) -> None:
    losses = loss_values(folder / "whole")
    assert len(losses) == NUM_STEPS
    assert sum(losses[-3:]) < FALLS * sum(losses[:3])


def test_a_resumed_run_equals_an_uninterrupted_run(done: dict[str, Any], folder: Path) -> None:
    assert loss_values(folder / "stopped") == loss_values(folder / "whole")
    ends = [read_tensors(checkpoint(folder / name, NUM_STEPS)) for name in ("stopped", "whole")]
    assert any(tensor.dim() == 4 for tensor in ends[0].values())
    assert_same_bits(*ends)


def test_two_ranks_with_sharded_weights_equal_one_rank(done: dict[str, Any], folder: Path) -> None:
    assert loss_values(folder / "fsdp2") == pytest.approx(loss_values(folder / "whole"), rel=ROUNDING)


def test_sampling_needs_trust_in_the_package_of_the_model(done: dict[str, Any], folder: Path) -> None:
    """A checkpoint names the class of its config; loading it imports only packages that the user named."""
    assert (folder / "drawn.png").stat().st_size > 0
    refused = done["not trusted"]
    assert refused.code == EXIT_CHECKPOINT
    assert "set the environment variable DIT_PACKAGES=tests" in refused.err


def test_reading_a_saved_configuration_needs_trust_in_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, path = call_recipe(FACTORY), tmp_path / "unet.yaml"
    config_file.write(task, path)
    with pytest.raises(ConfigError, match=r"which is not in dit, energon_data, recipes,.*DIT_PACKAGES=tests"):
        config_file.load(path)
    monkeypatch.setenv(TRUST_VARIABLE, "another, tests")
    assert config_file.built(config_file.load(path)) == config_file.built(task)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("parallel.tensor_model_parallel_size=2", "UNetConfig does not support tensor parallelism"),
        ("data.shapes=['1x8x8','1x4x8']", "UNetConfig does not support samples of different shapes in one micro-batch"),
    ],
)
def test_unsupported_settings_are_refused_before_the_model_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, says: str
) -> None:
    with mock.patch.object(UNet, "__init__", side_effect=AssertionError("built")):
        for words in (["--yes"], ["--dryrun", "--world-size", "2"]):
            assert launch_train([*words, "--factory", FACTORY, f"training.run_dir={tmp_path}", setting]) == EXIT_CONFIG
            assert says in capsys.readouterr().err


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    config = config_file.built(call_recipe(FACTORY)).model
    config.norm_groups = 5  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"hidden_size=16 is not a multiple of model.norm_groups=5; use 15"):
        config.validate()


def test_a_dry_run_counts_operations_and_memory(build_model: BuildModel, capsys: pytest.CaptureFixture[str]) -> None:
    """Convolutions have no FLOP formula: the dry run prints three times the count of torch for a forward pass."""
    config = config_file.built(call_recipe(FACTORY)).model
    network = build_model(config)
    one = pack(config, [0])
    with FlopCounterMode(display=False) as counter:
        network(one.latents_TC, torch.ones(1), one)
    shape = "x".join(map(str, one.grids[0]))
    assert launch_train(["--factory", FACTORY, "--dryrun", "--tokens", shape]) == EXIT_OK
    said = capsys.readouterr().out
    (per_token,) = re.findall(r"work +([0-9.e-]+) GFLOP per token", said)
    assert float(per_token) * 1e9 * one.layout.total_tokens == pytest.approx(3 * counter.get_total_flops(), rel=1e-3)
    (parameters,) = re.findall(r"parameters +([0-9,]+)", said)
    assert int(parameters.replace(",", "")) == sum(p.numel() for p in network.parameters())
    (total,) = re.findall(r"total +([0-9.]+) GiB", said)
    assert float(total) > 0
