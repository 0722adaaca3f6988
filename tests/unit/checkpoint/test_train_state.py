"""The training state: its held-out loss, and the identity of its data."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Optional

import pytest
import torch

from benchmarks.step import build_parser, config_of
from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.manifest import HeldOut, read_manifest
from dit.checkpoint.reading import find_checkpoint
from dit.checkpoint.state_files import SlotWeights, read_full
from dit.checkpoint.train_state import TrainState, build_state
from dit.data_api import DataConfig
from dit.errors import CheckpointError, ConfigError
from dit.inference.generator import load_generator
from dit.parallel.dims import ParallelConfig
from dit.training.pretrain import Run
from dit.training.start_weights import download_start, start_remarks
from energon_data.indexed import Sample, Samples
from energon_data.mock import MockData
from launch.average import main as average
from tests.support.published import save_network
from tests.support.tiny_runs import ONE_STREAM, finish, tiny_config, tiny_run


@pytest.mark.parametrize(("held_out", "validated"), [(None, False), (HeldOut(0.5, 3), False), (HeldOut(0.5, 6), True)])
def test_a_held_out_loss_belongs_only_to_its_step(held_out: HeldOut | None, validated: bool) -> None:
    """A run that resumes at step 6 with the held-out loss of step 3 must validate first."""
    names = "wrapped", "chunks", "optimizer", "shards", "ema", "stream", "groups", "update", "loss_scale"
    parts: dict[str, Any] = dict.fromkeys(names)
    assert TrainState(**parts, step=6, held_out=held_out).is_validated is validated


@pytest.mark.parametrize("identity", [None, {}, {"": {"Pictures": "digest a"}}], ids=["none", "settings", "samples"])
def test_data_without_an_identity_are_reported_once(
    tmp_path: Path, one_rank_world: ProcessGroups, caplog: pytest.LogCaptureFixture, identity: Optional[dict]
) -> None:
    """A resumed run cannot notice if their samples change."""

    class Pictures(MockData):
        def identity(self) -> Any:
            return DataConfig.identity(self) if identity is None else identity

    config = replace(tiny_config(tmp_path, *ONE_STREAM), data=Pictures(num_streams=1))
    _, spec = config.check_here()
    with caplog.at_level(logging.INFO, "dit.checkpoint"):
        state = build_state(config, spec, one_rank_world)
    state.stream.close()
    assert state.data == identity
    line = (
        "Pictures.identity returns None, so other samples will not be noticed when the run resumes; to refuse them, "
        "override it (docs/adding-a-data-source.md)"
    )
    assert [record.getMessage() for record in caplog.records] == ([line] if identity is None else [])


@dataclass(kw_only=True)
class Constant(Samples):
    """Eight pictures with one value, which is not a setting."""

    value: ClassVar[float]
    background: bool = False
    num_streams: Optional[int] = 1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Sample:
        return Sample(torch.full((1, 4, 4), self.value), {"label": 0})


def test_a_resumed_run_refuses_other_samples_of_a_user_source(
    tmp_path: Path, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the change is accepted, the samples are read from the beginning."""
    tiny = tiny_config(tmp_path, *ONE_STREAM, "model.in_channels=1", "model.context_size=null")

    def start(value: float, *accepted: str) -> Run:
        monkeypatch.setattr(Constant, "value", value, raising=False)
        checkpoint = replace(tiny.checkpoint, accept_changes=list(accepted))
        config = replace(tiny, data=Constant(), checkpoint=checkpoint)
        return Run(config, *config.check_here(), one_rank_world, quiet=True)

    def taken(run: Run) -> int:
        (position,) = run.state.stream.state_dict()["streams"].values()
        run.close()
        return position["position"]["taken"]

    run = start(0.5)
    run.step(torch.zeros(2))
    run.save()
    assert taken(run) == taken(start(0.5)) == 4
    with pytest.raises(ConfigError, match=r'data: Constant: 8 samples, digest \w+ -> 8 .*accept_changes=\["data"\]'):
        start(0.25)
    assert taken(start(0.25, "data")) == 0


def test_losses_of_another_objective_are_no_history_for_spikes(tmp_path: Path, one_rank_world: ProcessGroups) -> None:
    """With another objective, all losses may be above the limit that the former ones give."""

    def losses(*words: str) -> list[str]:
        run = tiny_run(tmp_path, one_rank_world, *ONE_STREAM, *words)
        finish(run, 0 if words else 2)
        return run.bad_steps.guard.state_dict()["loss"]

    former = losses()
    assert len(former) == 2
    assert losses("optimizer.lr=1e-5") == former
    assert losses("objective.time_shift=2", 'checkpoint.accept_changes=["objective"]') == []


def test_averages_are_resumed_by_their_length(tmp_path: Path, one_rank_world: ProcessGroups) -> None:
    """A run may drop a length, but not add one; `launch.average` reads the lengths of each checkpoint."""

    def start(lengths: str, *settings: str) -> Run:
        return tiny_run(tmp_path, one_rank_world, *ONE_STREAM, f"training.ema_sigma_rel={lengths}", *settings)

    run, accept = start("[0.05, 0.25]"), 'checkpoint.accept_changes=["training.ema_sigma_rel"]'
    finish(run, 3)
    message = (
        r"no power-function averages of lengths \[0.1\]; set training.ema_sigma_rel=\[0.05,0.25\] or start in a new"
    )
    with pytest.raises(CheckpointError, match=message):
        start("[0.25, 0.1]", accept)
    resumed = start("[0.25]", accept)
    short, long = run.state.ema.powers
    assert all(map(torch.equal, resumed.state.ema.powers[0].values, long.values))
    assert not all(map(torch.equal, short.values, long.values))
    resumed.attributions, resumed.reference_aspect = ["by A"], "square"
    finish(resumed)
    assert average(["--checkpoint", str(tmp_path), "--sigma-rel", "0.05", "--out", str(tmp_path / "out")]) == 0
    averaged = load_generator(tmp_path / "out", groups=one_rank_world)
    assert (averaged.longest_text, averaged.attributions) == (resumed.config.data.longest_text, ["by A"])
    assert averaged.reference_aspect == "square"


def test_an_average_of_adapters_has_their_base(tmp_path: Path, one_rank_world: ProcessGroups) -> None:
    """One average that is combined to its own length keeps its values."""
    settings = *ONE_STREAM, "optimizer.lr=0.1"
    finish(tiny_run(tmp_path / "base", one_rank_world, *settings, "training.ema_decay=none"), 3)
    words = "model.lora=lora", f"checkpoint.start_from={tmp_path / 'base'}", "training.ema_sigma_rel=[0.05]"
    run = tiny_run(tmp_path / "run", one_rank_world, *settings, *words)
    finish(run, 3)
    out = tmp_path / "out"
    assert average(["--checkpoint", str(tmp_path / "run"), "--sigma-rel", "0.05", "--out", str(out)]) == 0
    saved = SlotWeights(out / "checkpoints" / "iter_0000000", "weight")
    assert set(saved.shapes) == {shard.name for shard in run.state.shards}
    for shard, value in zip(run.state.shards, run.state.ema.powers[0].values, strict=True):
        torch.testing.assert_close(read_full(saved, shard.name).flatten(), value.flatten())
    base = load_generator(tmp_path / "base", weights="raw", groups=one_rank_world).generate([0, 1])
    assert not torch.equal(load_generator(out, groups=one_rank_world).generate([0, 1]), base)


def test_adapters_name_the_address_of_their_base_on_the_hub(
    tmp_path: Path, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do adapters that continue with them, and their average. Former runs name the folder in the local cache.

    If the cache is deleted, the base is downloaded before ranks that draw samples connect.
    """
    revision, moved, cache = "0" * 40, tmp_path / "moved", tmp_path / "snapshots/hub/models--owner--name"
    folder = cache / "snapshots" / revision
    save_network("dit", folder / "transformer")
    (folder / "model_index.json").write_text('{"_class_name": "DiTPipeline"}')
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    settings = "data=mock", "data.height=8", "data.width=8", *ONE_STREAM, "training.ema_sigma_rel=[0.05]"

    def train(name: str, base: Path | str) -> None:
        words = "--factory", f"finetune_lora(base='{base}')", *settings
        config = config_of(build_parser().parse_args(words), str(tmp_path / name))
        finish(Run(config, *config.check_here(), one_rank_world, quiet=True))

    with monkeypatch.context() as former:
        former.setattr("dit.checkpoint.base_model.pinned", lambda address, folder: str(folder))
        train("former", "hf://owner/name")
    train("first", "hf://owner/name")
    train("second", tmp_path / "first")
    averaging = ["--checkpoint", str(tmp_path / "second"), "--sigma-rel", "0.05", "--out", str(tmp_path / "averaged")]
    assert average(averaging) == 0
    revisions, events = {"former": None, **dict.fromkeys(("first", "second", "averaged"), revision)}, list[str]()
    bases = [read_manifest(find_checkpoint(tmp_path / name)[0]).base for name in revisions]
    assert [base and base["folder"] for base in bases[1:]] == [f"hf://owner/name@{revision}"] * 3

    def download(repository: str, *, revision: Optional[str], local_files_only: bool = False, **_: object) -> str:
        if not local_files_only:
            events.append(f"download {repository} {revision}")
            moved.rename(cache)
        if not cache.exists():
            raise FileNotFoundError(folder)
        return str(folder)

    def connect(parallel: ParallelConfig) -> ProcessGroups:
        events.append("connect")
        return one_rank_world

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("dit.hub.check_reachable", lambda repository: None)
    monkeypatch.setattr("dit.backends.process_groups.initialize", connect)
    for name, requested in revisions.items():
        for is_missing in (True, False):
            if is_missing:
                cache.rename(moved)
            events.clear()
            load_generator(tmp_path / name)
            assert events == [f"download owner/name {requested}", "connect"][not is_missing :], name


def test_all_averages_start_as_the_weights_of_another_run(tmp_path: Path, one_rank_world: ProcessGroups) -> None:
    first = tiny_run(tmp_path / "first", one_rank_world, *ONE_STREAM, "training.ema_decay=none", "training.seed=1")
    finish(first)
    words = f"checkpoint.start_from={tmp_path / 'first'}", "training.ema_sigma_rel=[0.05]"
    run = tiny_run(tmp_path / "second", one_rank_world, *ONE_STREAM, *words)
    run.close()
    for ema in (run.state.ema, *run.state.ema.powers):
        assert all(torch.equal(x, shard.main) for x, shard in zip(ema.values, first.state.shards, strict=True))


def test_a_start_has_the_settings_that_no_shape_depends_on(tmp_path: Path, one_rank_world: ProcessGroups) -> None:
    """So has the base of adapters; settings of training and accepted ones may differ."""

    def start(name: str, *words: str) -> Run:
        return tiny_run(tmp_path / name, one_rank_world, *ONE_STREAM, *words)

    finish(start("first"))
    words = f"checkpoint.start_from={tmp_path / 'first'}", "model.time_scale=7.0"
    message = (
        r'has time_scale=.*, but .* run has time_scale=7.0; .*"finetune(_lora)?\(base=.*accept.*\["model.time_scale"\]'
    )
    for adapters in ([], ["model.lora=lora"]):
        with pytest.raises(ConfigError, match=message):
            start(f"refused_{len(adapters)}", *words, *adapters)
        accept = 'checkpoint.accept_changes=["model.time_scale"]'
        start(f"accepted_{len(adapters)}", *words, *adapters, accept, "model.class_dropout=0.5").close()
    finish(start("adapters", words[0], "model.lora=lora", "model.lora.alpha=8"))
    words = f"checkpoint.start_from={tmp_path / 'adapters'}", "model.lora=lora"
    with pytest.raises(ConfigError, match=r'lora=.*alpha=8.0.*alpha=None.*"finetune_lora\(base=.*\["model.lora"\]'):
        start("other_scale", *words)
    for name, word in {"same": "model.lora.alpha=8", "accepted": 'checkpoint.accept_changes=["model.lora"]'}.items():
        start(f"{name}_scale", *words, word).close()
    finish(start("scale_1", *words, 'checkpoint.accept_changes=["model.lora"]', "model.lora.alpha=16"))
    start("equal_scale", f"checkpoint.start_from={tmp_path / 'scale_1'}", "model.lora=lora").close()


def test_a_start_has_the_encoders_of_the_data(tmp_path: Path, one_rank_world: ProcessGroups) -> None:
    """A run that resumes is not compared again."""

    class Embedded(MockData):
        def text_encoder(self) -> str:
            return "identity"

    first = tiny_run(tmp_path / "first", one_rank_world, *ONE_STREAM)
    first.text_encoder = "all-minilm-l6-v2"
    finish(first)
    config = tiny_config(tmp_path / "second", *ONE_STREAM, f"checkpoint.start_from={tmp_path / 'first'}")
    assert start_remarks(config) == []
    config = replace(config, data=Embedded(num_streams=1))
    with pytest.raises(ConfigError, match=r"first was trained with .*'all-minilm.*accept_changes=\[.checkpoint.start"):
        start_remarks(config)
    accepting = replace(config.checkpoint, accept_changes=["checkpoint.start_from"])
    assert start_remarks(replace(config, checkpoint=accepting)) == []
    assert start_remarks(replace(config, training=first.config.training)) == []


def test_adapters_resume_in_another_folder_on_their_base(tmp_path: Path, one_rank_world: ProcessGroups) -> None:
    """`start_from` names the frozen weights, and `resume_from` the state; without adapters, only one may be set."""

    def start(name: str, *words: str) -> Run:
        return tiny_run(tmp_path / name, one_rank_world, *ONE_STREAM, *words)

    finish(start("base"))
    adapters = "model.lora=lora", f"checkpoint.start_from={tmp_path / 'base'}"
    first = start("first", *adapters)
    finish(first)
    source = f"checkpoint.resume_from={tmp_path / 'first'}"
    run = start("second", *adapters, source)
    run.close()
    assert run.state.step == 1
    assert all(torch.equal(x.main, y.main) for x, y in zip(first.state.shards, run.state.shards, strict=True))
    with pytest.raises(ConfigError, match="remove one of the two"):
        start("third", adapters[1], source)


def test_a_base_is_downloaded_before_ranks_connect_also_by_a_resumed_run(
    tmp_path: Path, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run without adapters reads no base."""
    downloads: list[str] = []
    monkeypatch.setattr("dit.training.start_weights.local_path", lambda path: downloads.append(path) or tmp_path / "x")
    finish(tiny_run(tmp_path / "resumed", one_rank_world, *ONE_STREAM))
    for name, words, downloaded in (
        ("new", [], ["hf://a/b"]),
        ("new", ["model.lora=lora"], ["hf://a/b"]),
        ("resumed", [], []),
        ("resumed", ["model.lora=lora"], ["hf://a/b"]),
    ):
        downloads.clear()
        download_start(tiny_config(tmp_path / name, *ONE_STREAM, "checkpoint.start_from=hf://a/b", *words))
        assert downloads == downloaded, (name, words)
