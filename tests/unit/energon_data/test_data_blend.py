"""Blends as a setting: shares by weight, stages by step, each held-out sample once, resumes bit for bit."""

import json
import shutil
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_data import clips, spec, write_dataset
from small_streams import same, take, through_disk

from dit.data_api import NoData
from dit.encoders.online import null_texts
from dit.errors import ConfigError, DataError
from dit.run_config import RunConfig
from energon_data.blend import read_blend
from energon_data.dataset import EnergonData
from energon_data.folder import is_mixed
from energon_data.streams import StreamGroup
from examples.letters.moving import DIRECTIONS, prepare_moving_letters
from examples.letters.score import data_folder
from examples.letters.stills import LettersReport
from launch.overrides import parse_value
from tests.support.tiny_runs import tiny_config

STEP = 4
"""Micro-batches of a step, of four samples each."""


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three folders; each value of a sample is 100 times the folder's number plus the number of the sample."""
    root = tmp_path_factory.mktemp("members")
    return {
        name: write_dataset(
            root / name,
            {split: ((f"{name}{key}", *rest) for key, *rest in clips(n, sizes=[(1, 4, 4)])) for split, n in counts},
        )
        for name, counts in {
            "a": (("train", 40), ("val", 5)),
            "b": (("train", 24), ("val", 3)),
            "c": (("train", 16), ("val", 7)),
        }.items()
    }


def build(
    members: dict[str, Path], weights: dict[str, Any], *, rank: int = 0, dp: int = 1, **settings: Any
) -> tuple[EnergonData, StreamGroup]:
    data = EnergonData(
        blend=[{"path": str(members[name]), "weight": weight} for name, weight in weights.items()],
        num_streams=2,
        **settings,
    )
    data.validate(spec(), dp, STEP)
    stream = data.build_train(spec(), dp_rank=rank, dp_size=dp, seed=5, log_dir=None, micro_batches_per_step=STEP)
    assert isinstance(stream, StreamGroup)
    return data, stream


def sources(keys: tuple[str, ...]) -> Counter:
    return Counter(key.removeprefix("train_")[0] for key in keys)


def test_members_are_read_in_proportion_to_their_weights(members: dict[str, Path]) -> None:
    _, stream = build(members, {"a": 1, "b": 3, "c": 0})
    counts = sum((sources(batch.keys) for batch in take(stream, 300)), Counter())
    assert set(counts) == {"a", "b"}
    assert abs(counts["a"] / 1200 - 0.25) < 0.05  # four standard deviations


def test_each_member_is_read_in_passes(members: dict[str, Path]) -> None:
    _, stream = build(members, {"a": 1, "b": 3})
    keys = [key for batch in take(stream, 200)[::2] for key in batch.keys]  # of the first of two streams
    for name, count in (("a", 20), ("b", 12)):
        read = [key for key in keys if key.startswith(f"train_{name}")]
        passes = [read[i : i + count] for i in range(0, len(read) - count + 1, count)]
        assert len(passes) > 2
        assert all(len(set(one)) == count for one in passes)


@pytest.mark.parametrize(
    ("interval", "draws", "is_refused"),
    [(2, False, True), (4, False, False), (0, False, False), (4, True, True)],
)
def test_a_run_that_reaches_a_validation_needs_held_out_data_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int, draws: bool, is_refused: bool
) -> None:
    """The run of three steps is refused at its start, also if it draws samples from held-out pictures."""
    monkeypatch.setattr(RunConfig, "draws_held_out", draws)
    members = []
    for name, splits in {"both": ("train", "val"), "one": ("train",)}.items():
        samples = {split: clips(8, sizes=[(1, 4, 4)]) for split in splits}
        members.append({"path": str(write_dataset(tmp_path / name, samples)), "weight": 1})
    config = tiny_config(tmp_path / "run", "model.in_channels=2", "model.context_size=3")
    training = replace(config.training, num_steps=3, validation_interval=interval, sample_interval=3)
    config = replace(config, training=training, data=EnergonData(blend=members))
    if is_refused:
        with pytest.raises(DataError, match=r"one has no split 'val', .* or train with training.validation_interval=0"):
            config.check_here()
    else:
        config.check_here()


STAGES: dict[str, Any] = {"a": [1, 0, 1], "b": [0, 1, 1], "c": [0, 0, 2]}


def test_weights_change_at_their_steps(members: dict[str, Path]) -> None:
    _, stream = build(members, STAGES, blend_steps=[3, 5])
    steps = [sum((sources(b.keys) for b in take(stream, STEP)), Counter()) for _ in range(20)]
    assert all(set(step) == {"a"} for step in steps[:3])
    assert all(set(step) == {"b"} for step in steps[3:5])
    assert set(sum(steps[5:], Counter())) == {"a", "b", "c"}


@pytest.mark.parametrize(("before", "background"), [*((n, False) for n in (0, 5, 11, 12, 13, 19, 27)), (11, True)])
def test_a_resumed_curriculum_is_bitwise_equal(members: dict[str, Path], before: int, background: bool) -> None:
    """Resumes at the start, inside a stage, at its last micro-batch, at its end and after it."""
    _, stream = build(members, STAGES, blend_steps=[3, 5], background=background)
    take(stream, before)
    state = through_disk(stream.state_dict())
    _, resumed = build(members, STAGES, blend_steps=[3, 5])
    resumed.load_state_dict(state)
    try:
        same(take(stream, 14), take(resumed, 14))
    finally:
        stream.close()


def test_a_curriculum_does_not_depend_on_the_ranks(members: dict[str, Path]) -> None:
    _, alone = build(members, STAGES, blend_steps=[3, 5])
    ranks = [build(members, STAGES, blend_steps=[3, 5], rank=rank, dp=2)[1] for rank in range(2)]
    same(take(alone, 30), [next(ranks[j % 2]) for j in range(30)])


def test_held_out_data_contain_every_member_once(members: dict[str, Path]) -> None:
    data, _ = build(members, STAGES, blend_steps=[3, 5])
    keys = [key for batch in data.build_validation(spec(), dp_rank=0, dp_size=1) for key in batch.keys]
    assert len(keys) == len(set(keys)) == 15
    assert Counter(key.removeprefix("val_")[0] for key in keys) == {"a": 5, "b": 3, "c": 7}
    halves = [list(data.build_validation(spec(), dp_rank=rank, dp_size=2)) for rank in range(2)]
    assert {key for half in halves for batch in half for key in batch.keys} == set(keys)
    assert all(torch.isfinite(batch.latents_TC).all() for half in halves for batch in half)


@pytest.mark.parametrize(("limit", "counts"), [(7, (2, 1, 4)), (1, (0, 0, 1)), (15, (5, 3, 7)), (99, (5, 3, 7))])
def test_a_limit_of_held_out_samples_is_divided_over_the_members(
    members: dict[str, Path], limit: int, counts: tuple[int, ...]
) -> None:
    """Each member has its share."""
    data, _ = build(members, STAGES, blend_steps=[3, 5], validation_samples=limit)
    passes = []
    for dp in (1, 2):
        batches = [b for rank in range(dp) for b in data.build_validation(spec(), dp_rank=rank, dp_size=dp)]
        passes.append({key for batch in batches for key in batch.keys})
    assert passes[0] == passes[1]
    of_member = Counter(key.removeprefix("val_")[0] for key in passes[0])
    assert tuple(of_member[name] for name in "abc") == counts


@pytest.mark.parametrize(
    ("blend", "steps", "message"),
    [
        ([], [], "is empty"),
        ([{"path": "a", "share": 1}], [], r"entry \{'path': 'a', 'share': 1\}"),
        ([{"weight": 1}], [], "each is {path: DIR, weight: NUMBER}"),
        ([{"path": "a", "weight": -1}], [], "the weight -1"),
        ([{"path": "a", "weight": True}], [], "the weight True"),
        ([{"path": "a", "weight": "2"}], [], "the weight 2"),
        ([{"path": "a", "weight": [1, 2]}], [], "2 weights"),
        ([{"path": "a"}, {"path": "a"}], [], "names a folder twice"),
        ([{"path": "a", "weight": [1, 0]}], [9], "all weights of data.blend are 0 in stage 1"),
        ([{"path": "a"}], [9, 9], "must be ascending"),
    ],
)
def test_an_empty_blend_is_refused(blend: list, steps: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_blend(blend, steps)


def test_steps_without_a_blend_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.blend_steps changes the weights"):
        EnergonData(path="x", blend_steps=[3]).check_settings(spec(), 1, 1)


def test_a_blend_is_written_on_the_command_line() -> None:
    annotation = EnergonData.__annotations__["blend"]

    def parse(text: str) -> object:
        return parse_value(text, annotation, "data.blend")

    assert parse("[{path: data/a, weight: 3}, {path: data/b, weight: [0, 1.5]}]") == [
        {"path": "data/a", "weight": 3},
        {"path": "data/b", "weight": [0, 1.5]},
    ]
    assert parse("none") is None
    for wrong in ("data/a", "[data/a]", "{path: a}", "[{"):
        with pytest.raises(ConfigError, match="with a space after each colon"):
            parse(wrong)


def test_the_reader_of_letters_learns_from_the_letters_of_a_blend(
    mixed_folder: Path, letters: LettersReport, tmp_path: Path
) -> None:
    """The blend must have one data set of letters; otherwise the error names the members and the flag."""

    def folder_of(*members: Path, data: str | None = None) -> str:
        blend = [{"path": str(member)} for member in members]
        generator: Any = SimpleNamespace(config=SimpleNamespace(data=EnergonData(blend=blend)))
        return data_folder(Namespace(data=data), generator)

    assert folder_of(mixed_folder, letters.folder) == str(letters.folder)
    assert folder_of(mixed_folder, data="elsewhere") == "elsewhere"
    average: Any = SimpleNamespace(config=SimpleNamespace(data=NoData()))
    Path("data/letters").mkdir(parents=True)
    assert data_folder(Namespace(data=None), average) == "data/letters"
    with pytest.raises(ConfigError, match=f"a blend with 0 data sets of letters.*--data {mixed_folder}"):
        folder_of(mixed_folder, Path(shutil.copytree(mixed_folder, tmp_path / "copy")))


def test_members_of_a_blend_share_only_the_conditions_of_the_model(
    letters: LettersReport, bundled_fonts: Path, tmp_path: Path
) -> None:
    """Letters and moving letters have different classes: only a model without classes trains on a blend of both.

    The same holds for the encoders of their texts. Latents of two autoencoders are always refused.
    """
    still = Path(shutil.copytree(letters.folder, tmp_path / "letters"))
    (tmp_path / "fonts").mkdir()
    shutil.copy(bundled_fonts / "DejaVuSans.ttf", tmp_path / "fonts")
    fonts = [tmp_path / "fonts"]
    moving = prepare_moving_letters(tmp_path / "moving", fonts=fonts, variations=1, frames=2, stills=1).folder
    assert is_mixed(still), "otherwise streams take parts of all shards, and the order of the recorded results changes"
    assert is_mixed(moving)
    for folder, encoder in ((still, "one"), (moving, "another")):
        about = json.loads((folder / "dataset.json").read_text())
        (folder / "dataset.json").write_text(json.dumps({**about, "text_encoder": encoder, "vae": encoder}))
    data = EnergonData(
        blend=[{"path": str(folder)} for folder in (still, moving)], shuffle_buffer=0, max_tokens_per_pack=64
    )
    sizes = {"micro_batch_size": 1, "latent_channels": 1, "patch_temporal": 2, "patch_spatial": 8}
    neither = spec(num_classes=None, context_size=None, **sizes)
    data.validate(neither, 1, 1)
    packs = take(data.build_train(neither, dp_rank=0, dp_size=1, seed=0, log_dir=None), 12)
    read = {key.split("_")[2] for pack in packs for key in pack.keys}
    assert {"left", "up"} < read, "clips and stills of moving letters, whose names say where they move"
    assert read - set(DIRECTIONS), "letters"
    with pytest.raises(DataError, match="differ in class_names"):
        data.validate(spec(num_classes=200, context_size=None, **sizes), 1, 1)
    for texts in ({}, {"context_size": None, "pooled_size": 3}):
        with pytest.raises(DataError, match=r"differ in text_encoder.*one.*another"):
            data.validate(spec(num_classes=None, **texts, **sizes), 1, 1)
    assert null_texts(data, neither.conditions, torch.device("cpu")) == {}, "a model without texts"
    assert EnergonData(path=str(still)).autoencoder() == "one"
    with pytest.raises(DataError, match=r"differ in vae.*set sampling\.vae"):
        data.autoencoder()
