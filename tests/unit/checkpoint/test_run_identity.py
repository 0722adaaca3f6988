"""Copies at an address belong to one run: the runs that may read them, and the changes that a run may make."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dit.checkpoint.background import remote
from dit.checkpoint.background.remote import Owner, RemoteStore, copy_all
from dit.checkpoint.records import CONFIG_FILE
from dit.checkpoint.run_identity import RUN_FILE, join_run
from dit.checkpoint.store import CheckpointStore
from dit.errors import CheckpointError, ConfigError
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig
from dit.run_config import RunConfig
from dit.settings import CheckpointConfig, OptimizerConfig, TrainingConfig
from energon_data.mock import MockData


class Folder:
    """A run folder, and the settings of the run in it."""

    def __init__(self, root: Path, run_dir: str, accept: list[str] | None = None, **parts: Any) -> None:
        training = {"run_dir": str(root / run_dir), **parts.pop("training", {})}
        self.config = RunConfig(
            model=DiTConfig(num_classes=3),
            objective=FlowMatching(),
            training=TrainingConfig(**training),
            checkpoint=CheckpointConfig(copy_to=f"file://{root}/copies", accept_changes=accept),
            **{"data": MockData(), **parts},
        )
        self.run_dir = Path(training["run_dir"])
        self.store = CheckpointStore(self.run_dir / "checkpoints", self.config.checkpoint)

    def join(self) -> str:
        run = join_run(self.store, self.config)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / RUN_FILE).write_text(run)
        return run

    def save(self, step: int, run: str | None) -> None:
        folder = self.store.begin(step)
        (folder / CONFIG_FILE).write_text(yaml.safe_dump(self.config.to_record()))
        self.store.publish(step, {} if run is None else {"run": run})

    def copy(self, run: str) -> None:
        remote = RemoteStore(self.config.checkpoint.copy_to or "")
        remote.claim(Owner(run, self.config.to_record()))
        copy_all(self.store, remote)


@pytest.fixture
def owner(tmp_path: Path) -> tuple[Folder, str]:
    """Return a run whose checkpoint of step 4 is copied, and the run's id."""
    folder = Folder(tmp_path, "a")
    run = folder.join()
    folder.save(4, run)
    folder.copy(run)
    return folder, run


def lose(folder: Folder) -> None:
    folder.run_dir.rename(folder.run_dir.with_name("lost"))


def test_the_same_settings_in_an_empty_folder_continue_the_run(owner: tuple[Folder, str], tmp_path: Path) -> None:
    """Also with another length and layout: a new machine may have another number of devices."""
    folder, run = owner
    lose(folder)
    again = Folder(tmp_path, "a", training={"num_steps": 7}, parallel=ParallelConfig(tensor_model_parallel_size=2))
    assert again.join() == run
    assert again.store.steps() == [4]


SIBLINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("b", {}, ["training.run_dir"]),
    ("a", {"optimizer": OptimizerConfig(lr=3e-4)}, ["optimizer.lr"]),
    ("b", {"training": {"seed": 5}}, ["training.run_dir", "training.seed"]),
    ("a", {"data": MockData(height=8)}, ["data.height"]),
]


@pytest.mark.parametrize(("run_dir", "changed", "names"), SIBLINGS)
def test_other_settings_in_an_empty_folder_are_another_run(
    owner: tuple[Folder, str], tmp_path: Path, run_dir: str, changed: dict[str, Any], names: list[str]
) -> None:
    """Nothing is fetched. The message has the id, the differences, and the setting that continues the run."""
    folder, run = owner
    lose(folder)
    accept = '["' + '","'.join(names) + '"]'
    with pytest.raises(ConfigError) as raised:
        Folder(tmp_path, run_dir, **changed).join()
    for words in (f"has the copies of run {run} in training.run_dir={folder.run_dir}", f"accept_changes={accept}"):
        assert words in str(raised.value)
    assert not folder.run_dir.exists()
    assert not (tmp_path / "b").exists()
    accepting = Folder(tmp_path, run_dir, names, **changed)
    assert accepting.join() == run
    assert accepting.store.steps() == [4]


def test_a_run_with_an_id_may_change_its_settings_and_not_its_address(
    owner: tuple[Folder, str], tmp_path: Path
) -> None:
    folder, run = owner
    changed = Folder(tmp_path, "a", optimizer=OptimizerConfig(lr=3e-4))
    assert changed.join() == run
    changed.copy(run)
    other = Folder(tmp_path, "b", accept=["training"])
    other.run_dir.mkdir()
    (other.run_dir / RUN_FILE).write_text("0123\n")
    with pytest.raises(ConfigError, match=rf"copies of run {run} in .*run_dir={other.run_dir} is run 0123; give"):
        other.join()
    # A lost disk: the run continues with the settings that it had last.
    lose(folder)
    assert Folder(tmp_path, "a", optimizer=OptimizerConfig(lr=3e-4)).join() == run


def test_a_copied_run_folder_is_another_run(owner: tuple[Folder, str], tmp_path: Path) -> None:
    """It has the same id, but another folder."""
    folder, run = owner
    other = Folder(tmp_path, "b")
    other.save(6, run)
    with pytest.raises(ConfigError, match=r"accept_changes=\[\"training.run_dir\"\]"):
        other.join()
    (folder.run_dir / RUN_FILE).unlink()
    assert folder.join() == run  # read from its newest checkpoint


def test_an_address_is_claimed_before_the_first_copy(tmp_path: Path) -> None:
    one = Folder(tmp_path, "a")
    run = one.join()
    assert RemoteStore(f"file://{tmp_path}/copies").owner() == Owner(run, one.config.to_record())
    with pytest.raises(ConfigError, match=run):
        Folder(tmp_path, "b").join()
    with pytest.raises(
        CheckpointError, match=rf"copies of run {run} .*this is run 0123 in .*separate checkpoint.copy_to"
    ):
        Folder(tmp_path, "b").copy("0123")


def test_an_address_that_cannot_be_read_stops_only_a_run_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    folder = Folder(tmp_path, "a")
    folder.config = replace(folder.config, checkpoint=replace(folder.config.checkpoint, copy_to="s3://runs/mine"))
    with pytest.raises(CheckpointError, match=r"127\.0\.0\.1:9"):
        folder.join()
    folder.save(4, "0123")
    assert folder.join() == "0123"
    assert f"the checkpoints of {folder.store.root} are used: " in caplog.text


def test_a_run_without_copies_keeps_its_id(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "a")
    folder.config = replace(folder.config, checkpoint=dataclasses.replace(folder.config.checkpoint, copy_to=None))
    run = folder.join()
    assert (
        folder.join()
        == run
        != join_run(CheckpointStore(tmp_path / "b" / "checkpoints", CheckpointConfig()), folder.config)
    )
