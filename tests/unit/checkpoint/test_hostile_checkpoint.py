"""A checkpoint from a stranger, changed and with matching hashes, runs no code and is read or refused in one line."""

import math
import pickle
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dit.backends import process_groups
from dit.checkpoint.checkpointer import read_loader_state
from dit.checkpoint.full_weights import read_full_weights, write_imported
from dit.checkpoint.manifest import MANIFEST, Manifest, hash_tree, read_manifest
from dit.checkpoint.state_files import StateReader
from dit.convert.diffusers_format import TrainedModel
from dit.errors import CheckpointError, ConfigError, UserError, exit_code
from dit.inference.generator import load_generator
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.settings import SamplingConfig
from launch import evaluate, export, sample
from tests.support.trap import Trap

MODEL = {"hidden_size": 8, "num_layers": 1, "num_attention_heads": 1, "num_classes": 2}
FILES = ("config.yaml", "metadata.json", "loader/dp_00000.pt", "rank_00000.safetensors", "state.json")
PLANTED = (".metadata", "common.pt", "__0_0.distcp", "rank_00001.safetensors")


def payloads(marker: Path) -> dict[str, bytes]:
    torch.save(Trap(marker), marker.with_suffix(".pt"))
    command = f"!!python/object/apply:os.mkdir ['{marker}']"
    return {
        "pickle": pickle.dumps(Trap(marker)),
        "torch.save": marker.with_suffix(".pt").read_bytes(),
        "yaml": command.encode(),
        "yaml in a field": f"model: {command}\ntraining: {{ema_decay: null}}\n".encode(),
        "json": b'{"_target_": "os.mkdir", "path": "x"}',
    }


def seal(folder: Path) -> None:
    """Write a manifest that matches the files, as anybody can who knows the format."""
    (folder / MANIFEST).unlink(missing_ok=True)
    old = Manifest(step=0, files=hash_tree(folder, {}), meta={"imported_from": "x", "consumed_samples": 0})
    (folder / MANIFEST).write_text(old.to_text())


@pytest.fixture
def run_dir(tmp_path, one_rank_world, monkeypatch) -> Path:
    """Return a run folder with one small checkpoint, whose manifest was written by `seal`."""
    monkeypatch.setattr(process_groups, "initialize", lambda parallel: one_rank_world)  # all tests use one world
    from dit.parallel.build import parameter_shapes

    weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(DiTConfig(**MODEL)).items()}
    trained = TrainedModel(DiTConfig(**MODEL), FlowMatching(), (1, 4, 4), {})
    folder = write_imported(tmp_path / "run", weights, trained, SamplingConfig(), "a test")
    (folder / "loader").mkdir()
    torch.save({"streams": {}}, folder / "loader" / "dp_00000.pt")
    seal(folder)
    return tmp_path / "run"


def use(run_dir: Path) -> None:
    """Read a checkpoint in every possible way."""
    folder = run_dir / "checkpoints" / "iter_0000000"
    for read in (
        lambda: load_generator(run_dir),
        lambda: read_full_weights(folder, "weight"),
        lambda: read_loader_state(folder),
        lambda: StateReader(folder),
    ):
        with suppress(UserError):  # a one-line error with an exit code
            read()


@pytest.mark.parametrize("name", [*FILES, *PLANTED])
def test_no_file_of_a_checkpoint_executes_code(run_dir, tmp_path, name):
    folder, marker = run_dir / "checkpoints" / "iter_0000000", tmp_path / "sprung"
    original = (folder / name).read_bytes() if name in FILES else None
    for payload in payloads(marker).values():
        (folder / name).write_bytes(payload)
        seal(folder)
        use(run_dir)
        assert not marker.exists(), name
    if original is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(original)
    seal(folder)
    load_generator(run_dir)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(run_dir, tmp_path, capsys, value):
    """All commands that use a model refuse them; a resumed run finds them in its next step."""
    folder = run_dir / "checkpoints" / "iter_0000000"
    weights = load_file(folder / "rank_00000.safetensors")
    (stored,) = (name for name in weights if name.startswith("weight.layers.0.mlp.linear_fc1.weight@"))
    weights[stored][1, 2] = value
    save_file(weights, folder / "rank_00000.safetensors")
    seal(folder)
    commands = {
        sample: ["--out", str(tmp_path / "x.png")],
        export: ["--format", "dit", "--out", str(tmp_path / "x.pt")],
        evaluate: ["--metric", "letters", "--count", "2"],
    }
    for command, words in commands.items():
        assert command.main(["--checkpoint", str(run_dir), *words]) == exit_code(CheckpointError("")), command
        said = capsys.readouterr().err.splitlines()
        assert re.fullmatch(
            rf"error: {stored.partition('@')[0]} in .* has 1 NaN or infinite values of \d+; .*", said[-1]
        )
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("base", ["text", {"folder": 3, "digest": "a"}, {"folder": "a"}, [1]])
def test_the_base_of_adapters_is_a_record(run_dir, base):
    """The manifest of a checkpoint with adapters names the checkpoint with the other weights."""
    folder = run_dir / "checkpoints" / "iter_0000000"
    manifest = read_manifest(folder)
    (folder / MANIFEST).write_text(replace(manifest, meta={**manifest.meta, "base": base}).to_text())
    with pytest.raises(CheckpointError, match="names no checkpoint as its base"):
        _ = read_manifest(folder).base
    with suppress(UserError):
        load_generator(run_dir)


def test_the_number_of_samples_is_one_of_64_bits(run_dir):
    folder = run_dir / "checkpoints" / "iter_0000000"
    manifest = read_manifest(folder)
    (folder / MANIFEST).write_text(replace(manifest, meta={"consumed_samples": 10**400}).to_text())
    with pytest.raises(CheckpointError, match="an integer of 401 digits"):
        read_manifest(folder)


def test_recorded_settings_of_sampling_are_checked_before_use(run_dir):
    folder = run_dir / "checkpoints" / "iter_0000000"
    settings = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(settings.replace("num_steps: 30", f"num_steps: {10**12}"))
    seal(folder)
    with pytest.raises(ConfigError, match=r"sampling\.num_steps=1000000000000 must be"):
        load_generator(run_dir).sampling()


def test_positions_that_do_not_belong_together_are_refused(tmp_path):
    """The files of two ranks may be of different steps, or a checkpoint may lack a position."""
    (tmp_path / "loader").mkdir()
    with pytest.raises(CheckpointError, match="holds no position"):
        read_loader_state(tmp_path)
    for rank, following in enumerate((8, 8)):
        torch.save({"next": following, "streams": {rank: {}}}, tmp_path / "loader" / f"dp_0000{rank}.pt")
    assert read_loader_state(tmp_path) == {"next": 8, "streams": {0: {}, 1: {}}}
    torch.save({"next": 12, "streams": {1: {}}}, tmp_path / "loader" / "dp_00001.pt")
    with pytest.raises(CheckpointError, match="differ in entries other than streams"):
        read_loader_state(tmp_path)
