"""A new run starts from another run's averaged weights: later stages of training, and fine-tuning."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.base_model import find_start
from dit.checkpoint.reading import find_checkpoint, read_settings
from dit.errors import CheckpointError
from tests.integration.runs import training
from tests.support.ranks import Job, run_jobs
from tests.unit.checkpoint.checkpoints import make_store, save

pytestmark = pytest.mark.slow


def train(run_dir: Path, ranks: int = 1, **settings: Any) -> Job:
    return training("tiny_moviegen", run_dir, ranks, schedule__warmup_steps=0, **settings)


def weights(run_dir: Path, slot: str, groups: ProcessGroups) -> dict[str, torch.Tensor]:
    from dit.checkpoint.sharded_state import load_weights
    from dit.checkpoint.state_files import SlotWeights
    from dit.parallel.build import build_model
    from dit.parallel.dims import ParallelConfig
    from dit.settings import TrainingConfig

    folder, _ = find_checkpoint(run_dir)
    config, _ = read_settings(folder)
    chunks = build_model(config.model, ParallelConfig(), TrainingConfig(precision="fp32"), groups)
    load_weights(SlotWeights(folder, slot), chunks, groups)
    return {name: parameter.detach() for chunk in chunks for name, parameter in chunk.named_parameters()}


def test_a_stage_starts_from_the_average_of_the_previous_stage(tmp_path, one_rank_world):
    """The weights start as the other run's average (lr is tiny); step, optimizer and data start again.

    Parameters added by an objective are newly initialised; the third run, whose objective has none, drops them.
    """
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other"
    start = {"training__num_steps": 1, "checkpoint__start_from": first}
    jobs = {
        "first": train(first, training__num_steps=3),
        "second": train(second, 2, **start, optimizer__lr=1e-9, objective="edm_uncertainty"),
        "third": train(tmp_path / "third", training__num_steps=1, checkpoint__start_from=second),
        "other": train(other, **start, model__hidden_size=32),
    }
    ended = run_jobs(tmp_path / "world", jobs)
    assert ended["first"].code == 0, ended["first"].err
    assert [rank.code for rank in ended["second"]] == [0, 0], ended["second"][0].err
    assert (second / "checkpoints" / "iter_0000001").is_dir()
    assert ended["third"].code == 0, ended["third"].err
    average, raw = (weights(first, slot, one_rank_world) for slot in ("ema", "weight"))
    for name, value in weights(second, "weight", one_rank_world).items():
        torch.testing.assert_close(value, average[name], rtol=0, atol=1e-7)
    assert any(not torch.allclose(raw[name], average[name], atol=1e-5) for name in raw)

    assert ended["other"].code == 2, ended["other"].err
    assert "is of another model" in ended["other"].err


def test_a_missing_start_is_an_error(tmp_path, one_rank_world):
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.start_from: .*, or a folder or hf:// address of diffusers$"
    ):
        find_start(str(tmp_path / "nowhere"), ExitStack(), one_rank_world)


def test_a_start_skips_a_damaged_checkpoint(tmp_path, one_rank_world):
    reading = ExitStack()
    store = make_store(tmp_path / "checkpoints", keep_last=2)
    save(store, 10)
    save(store, 20)
    assert find_checkpoint(tmp_path, reading, one_rank_world) == (store.path(20), 20)
    damaged = store.path(20) / "rank_1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert find_checkpoint(tmp_path, reading, one_rank_world) == (store.path(10), 10)
    with pytest.raises(CheckpointError, match=r"checkpoint\.start_from: .*damaged after saving"):
        find_start(str(store.path(20)), reading, one_rank_world)
