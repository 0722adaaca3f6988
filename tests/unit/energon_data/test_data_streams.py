"""Laws of the streams: the order does not depend on the ranks, and a resumed run continues bit for bit."""

import io
import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_data import spec

from dit.batch import PackedBatch
from dit.data_api import DataConfig, merge_states
from dit.errors import ConfigError, DataError
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from energon_data.prepare.letters import LettersReport
from energon_data.prepare.moving_letters import DIRECTIONS, prepare_moving_letters
from energon_data.state_codec import from_plain, to_plain
from energon_data.streams import StreamGroup, check_streams
from launch.letter_score import data_folder

PACKED: dict[str, Any] = {"max_tokens_per_pack": 40, "packing_buffer_size": 24, "pad_packs": True}
AUGMENTED: dict[str, Any] = {"resize_side": 10, "crop_size": [8, 6], "flip": 0.5, "shuffle_buffer": 10}


def build(data: DataConfig, rank: int = 0, dp: int = 1, mbs: int = 4) -> StreamGroup:
    channels = 3 if isinstance(data, EnergonData) and data.crop_size else 2
    asked = spec(micro_batch_size=mbs, latent_channels=channels)
    stream = data.build_train(asked, dp_rank=rank, dp_size=dp, seed=5, log_dir=None)
    assert isinstance(stream, StreamGroup)
    return stream


def take(stream: Iterator[PackedBatch], count: int) -> list[PackedBatch]:
    return [next(stream) for _ in range(count)]


def same(some: list[PackedBatch], others: list[PackedBatch]) -> None:
    assert [x.keys for x in some] == [y.keys for y in others]
    for x, y in zip(some, others):
        for name in ("latents_TC", "positions_T3", "sample_ids_S", "draws_S"):
            a, b = getattr(x, name), getattr(y, name)
            assert a is b is None or torch.equal(a, b), name
        assert set(x.conditions) == set(y.conditions)
        for name in x.conditions:
            assert torch.equal(x.conditions[name].values, y.conditions[name].values), name
        assert x.layout.lengths == y.layout.lengths
        assert x.conditions["context"].layout.lengths == y.conditions["context"].layout.lengths


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


CASES: dict[str, Callable[[Path, Path], tuple[DataConfig, int]]] = {
    "dense": lambda f, _: (EnergonData(path=str(f), num_streams=4, shuffle_buffer=10), 4),
    "packed": lambda f, _: (EnergonData(path=str(f), num_streams=4, shuffle_buffer=10, **PACKED), 1),
    "buckets": lambda f, _: (EnergonData(path=str(f), num_streams=4, bucket_by_shape=True, shuffle_buffer=5), 4),
    "augmented": lambda _, p: (EnergonData(path=str(p), num_streams=4, **AUGMENTED), 4),
    "augmented packed": lambda _, p: (EnergonData(path=str(p), num_streams=4, **AUGMENTED, **PACKED), 1),
    "mock": lambda *_: (MockData(shapes=["1x4x4", "2x6x4"], num_streams=4, text_tokens=5), 4),
    "mock packed": lambda *_: (MockData(shapes=["1x4x4", "2x6x4"], num_streams=4, max_tokens_per_pack=50), 1),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, mixed_folder: Path, picture_folder: Path) -> tuple[DataConfig, int]:
    return CASES[request.param](mixed_folder, picture_folder)


def test_order_does_not_depend_on_data_parallel_size(case: tuple[DataConfig, int]) -> None:
    data, mbs = case
    alone = take(build(data, mbs=mbs), 24)
    for dp in (2, 4):
        ranks = [build(data, rank, dp, mbs) for rank in range(dp)]
        dealt = [next(ranks[j % dp]) for j in range(24)]
        same(alone, dealt)


def test_every_draw_of_a_run_has_its_own_number(case: tuple[DataConfig, int]) -> None:
    """The k-th sample of stream s is draw k * 4 + s of four streams, in whatever micro-batch it comes."""
    data, mbs = case
    batches = take(build(data, mbs=mbs), 24)
    seen = [0] * 4
    for j, batch in enumerate(batches):
        stream, count = j % 4, batch.layout.num_samples
        assert batch.draws_S.tolist() == [(seen[stream] + i) * 4 + stream for i in range(count)]
        seen[stream] += count
    draws = [int(n) for batch in batches for n in batch.draws_S]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_resume_continues_bit_for_bit(case: tuple[DataConfig, int], steps: int) -> None:
    data, mbs = case
    stream = build(data, mbs=mbs)
    take(stream, steps)
    state = through_disk(stream.state_dict())
    rest = take(stream, 13)
    resumed = build(data, mbs=mbs)
    resumed.load_state_dict(state)
    again = through_disk(resumed.state_dict())
    same(rest, take(resumed, 13))
    twice = build(data, mbs=mbs)
    twice.load_state_dict(again)
    same(rest, take(twice, 13))


def test_resume_on_another_number_of_ranks(case: tuple[DataConfig, int]) -> None:
    data, mbs = case
    alone = build(data, mbs=mbs)
    take(alone, 8)
    ranks = [build(data, rank, 2, mbs) for rank in range(2)]
    for rank in ranks:
        take(rank, 4)
    state = through_disk(merge_states([rank.state_dict() for rank in ranks]))
    wide = [build(data, rank, 4, mbs) for rank in range(4)]
    for rank in wide:
        rank.load_state_dict(state)
    same(take(alone, 12), [next(wide[j % 4]) for j in range(12)])


@pytest.mark.parametrize(
    ("packing", "before", "after"),
    [({}, True, False), ({}, False, True), (PACKED, True, True)],
    ids=["dense on-off", "dense off-on", "packed on-on"],
)
def test_background_reads_the_same_and_resumes_anywhere(
    mixed_folder: Path, packing: dict[str, Any], before: bool, after: bool
) -> None:
    mbs = 1 if packing else 4
    common: dict[str, Any] = {"path": str(mixed_folder), "num_streams": 2, "shuffle_buffer": 10, **packing}
    expected = take(build(EnergonData(**common), mbs=mbs), 15)
    stream = build(EnergonData(**common, background=before), mbs=mbs)
    resumed = build(EnergonData(**common, background=after), mbs=mbs)
    try:
        same(expected[:5], take(stream, 5))
        resumed.load_state_dict(through_disk(stream.state_dict()))
        same(expected[5:], take(resumed, 10))
        # A state taken before and after the first micro-batch of a resumed run is as good.
        third = build(EnergonData(**common), mbs=mbs)
        third.load_state_dict(through_disk(resumed.state_dict()))
        same(take(resumed, 4), take(third, 4))
    finally:
        stream.close()
        resumed.close()


@pytest.mark.parametrize("background", [False, True])
def test_states_of_older_versions_are_continued(mixed_folder: Path, background: bool) -> None:
    """They counted the deliveries behind a position inside it, and had no such count outside."""
    data = EnergonData(path=str(mixed_folder), num_streams=2, shuffle_buffer=10, background=False)
    stream = build(data)
    batches, state = take(stream, 4), stream.state_dict()
    for one in state["streams"].values():
        del one["behind"]
        one["position"]["behind"] = 1
    batches += take(stream, 8)
    data.background = background
    resumed = build(data)
    resumed.load_state_dict(through_disk(state))
    for found, expected in zip(take(resumed, 6), batches[6:], strict=True):
        assert found.keys == expected.keys
    resumed.close()


def test_one_epoch_has_every_sample_once(mixed_folder: Path) -> None:
    data = EnergonData(path=str(mixed_folder), num_streams=3, shuffle_buffer=0)
    keys = [key for batch in take(build(data, mbs=5), 15) for key in batch.keys]
    assert len(keys) == len(set(keys)) == 75


def test_packs_from_disk_keep_the_laws(mixed_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = EnergonData(path=str(mixed_folder), shuffle_buffer=0, **PACKED)
    lengths = {(1, 2, 2): 4, (2, 2, 2): 8, (1, 3, 4): 12}
    filled = []
    for batch in take(build(data, mbs=1), 20):
        batch.validate(spec().conditions)
        assert batch.layout.total_tokens == 40
        assert batch.layout.lengths == tuple(lengths[g] for g in batch.grids)
        filled.append(batch.layout.valid_tokens / 40)
        for row, key in zip(batch.latents_TC[batch.layout.cu_seqlens_padded[:-1].long()], batch.keys):
            assert row.unique().tolist() == [float(key[-5:])]
    assert sum(filled) / len(filled) > 0.9
    assert capfd.readouterr() == ("", ""), "no progress bars, no prints"


def test_buckets_hold_one_shape(mixed_folder: Path) -> None:
    data = EnergonData(path=str(mixed_folder), bucket_by_shape=True)
    for batch in take(build(data), 10):
        assert batch.grid(1, 2).shape[0] == 4


def test_order_depends_on_the_seed_and_not_on_global_random_state(mixed_folder: Path) -> None:
    data = EnergonData(path=str(mixed_folder), shuffle_buffer=10)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = [b.keys for b in take(build(data), 6)]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert first == [b.keys for b in take(build(data), 6)]
    other = data.build_train(spec(), dp_rank=0, dp_size=1, seed=6, log_dir=None)
    assert first != [next(other).keys for _ in range(6)]


def test_of_long_texts_the_first_tokens_stay(mixed_folder: Path) -> None:
    full, truncated = (
        take(build(EnergonData(path=str(mixed_folder), max_text_tokens=limit, shuffle_buffer=0)), 5)
        for limit in (None, 3)
    )
    for before, after in zip(full, truncated, strict=True):
        assert before.keys == after.keys
        true = [1 + int(key[-5:]) % 8 for key in after.keys]
        assert after.conditions["context"].layout.lengths == tuple(min(3, length) for length in true)
        texts = before.conditions["context"].values.split(true)
        assert torch.equal(after.conditions["context"].values, torch.cat([text[:3] for text in texts]))


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("packing", [{}, PACKED], ids=["dense", "packed"])
def test_validation_is_the_same_pass_on_any_layout(mixed_folder: Path, dp: int, packing: dict[str, Any]) -> None:
    data = EnergonData(path=str(mixed_folder), validation_micro_batches=None, **packing)
    s = spec(micro_batch_size=1 if packing else 4)
    full = list(data.build_validation(s, dp_rank=0, dp_size=1))
    assert sorted(k for b in full for k in b.keys) == [f"val_clip{i:05d}" for i in range(21)]
    ranks = [list(data.build_validation(s, dp_rank=r, dp_size=dp)) for r in range(dp)]
    count = -(-len(full) // dp)
    assert [len(r) for r in ranks] == [count] * dp
    dealt = [ranks[j % dp][j // dp] for j in range(count * dp)]
    same(full, dealt[: len(full)])
    same([full[j % len(full)] for j in range(len(full), count * dp)], dealt[len(full) :])
    same(dealt, [list(data.build_validation(s, dp_rank=j % dp, dp_size=dp))[j // dp] for j in range(count * dp)])


def test_validation_between_training_steps_changes_nothing(mixed_folder: Path) -> None:
    data = EnergonData(path=str(mixed_folder), num_streams=2, shuffle_buffer=10, validation_micro_batches=3)
    quiet = take(build(data), 10)
    stream = build(data)
    mixed = take(stream, 4)
    validation = data.build_validation(spec(), dp_rank=0, dp_size=1)
    next(validation)
    mixed += take(stream, 3)
    assert len(list(validation)) == 2
    same(quiet, mixed + take(stream, 3))


def test_blend_of_two_folders(mixed_folder: Path, letters: LettersReport, tmp_path: Path) -> None:
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        f"      - {{weight: 3, path: {mixed_folder}, subflavors: {{media: video}}}}\n"
        f"      - {{weight: 1, path: {mixed_folder}, subflavors: {{media: image}}}}\n"
        f"  val: {{path: {mixed_folder}}}\n"
    )
    data = EnergonData(path=str(blend), num_streams=2, shuffle_buffer=10)
    data.validate(spec(), 1, 2)
    stream = build(data)
    take(stream, 5)
    resumed = build(data)
    resumed.load_state_dict(through_disk(stream.state_dict()))
    same(take(stream, 8), take(resumed, 8))
    assert list(data.build_validation(spec(), dp_rank=0, dp_size=1))


def test_the_reader_of_letters_learns_from_the_letters_of_a_blend(
    mixed_folder: Path, letters: LettersReport, tmp_path: Path
) -> None:
    """Of one data set of letters among others; where there is none, the members are named, and the flag."""

    def found(*members: Path, data: str | None = None) -> str:
        listed = "".join(f"      - {{path: {member}}}\n" for member in members)
        blend = tmp_path / "blend.yaml"
        text = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n" + listed
        blend.write_text(text)
        generator: Any = SimpleNamespace(config=SimpleNamespace(data=EnergonData(path=str(blend))))
        return data_folder(Namespace(data=data), generator)

    assert found(mixed_folder, letters.folder) == str(letters.folder)
    assert found(mixed_folder, data="elsewhere") == "elsewhere"
    with pytest.raises(ConfigError, match=f"a blend with 0 data sets of letters.*--data {mixed_folder}"):
        found(mixed_folder, mixed_folder)


def test_a_blend_need_agree_only_on_what_the_model_takes(
    letters: LettersReport, bundled_fonts: Path, tmp_path: Path
) -> None:
    """Letters and moving letters have other classes: a model that takes none trains on both, one that does on neither.

    The same is true for the encoders of their texts. Latents of two autoencoders are never one thing.
    """
    still = Path(shutil.copytree(letters.folder, tmp_path / "letters"))
    (tmp_path / "fonts").mkdir()
    shutil.copy(bundled_fonts / "DejaVuSans.ttf", tmp_path / "fonts")
    fonts = [tmp_path / "fonts"]
    moving = prepare_moving_letters(tmp_path / "moving", fonts=fonts, variations=1, frames=2, stills=1).folder
    for folder, encoder in ((still, "one"), (moving, "another")):
        about = json.loads((folder / "dataset.json").read_text())
        (folder / "dataset.json").write_text(json.dumps({**about, "text_encoder": encoder, "vae": encoder}))
    blend = tmp_path / "blend.yaml"
    members = "".join(f"      - {{weight: 1, path: {folder}}}\n" for folder in (still, moving))
    blend.write_text(
        f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n{members}"
    )
    data = EnergonData(path=str(blend), shuffle_buffer=0, max_tokens_per_pack=64)
    sizes = {"micro_batch_size": 1, "latent_channels": 1, "patch_temporal": 2, "patch_spatial": 8}
    neither = spec(num_classes=None, context_size=None, **sizes)
    data.validate(neither, 1, 1)
    packs = take(data.build_train(neither, dp_rank=0, dp_size=1, seed=0, log_dir=None), 12)
    read = {key.split("_")[2] for pack in packs for key in pack.keys}
    assert {"left", "up"} < read, "clips and stills of moving letters, whose names say where they move"
    assert read - set(DIRECTIONS), "letters"
    with pytest.raises(DataError, match="differ in class_names"):
        data.validate(spec(num_classes=200, context_size=None, **sizes), 1, 1)
    with pytest.raises(DataError, match="differ in text_encoder"):
        data.validate(spec(num_classes=None, **sizes), 1, 1)
    assert EnergonData(path=str(still)).autoencoder() == "one"
    with pytest.raises(DataError, match=r"differ in vae.*name it with sampling\.vae"):
        data.autoencoder()


@pytest.mark.parametrize(
    ("streams", "dp", "per_step", "words"),
    [
        (3, 2, 6, "multiple of the data-parallel size 2; nearest are 2 and 4"),
        (4, 2, 6, r"use 4 or 8 micro-batches, or num_streams one of \[2, 6\]"),
        (0, 2, 6, "nearest are 2"),
        (None, 4, 6, r"multiple of data.num_streams=4"),
    ],
)
def test_stream_counts_that_do_not_fit_name_the_numbers(streams: int, dp: int, per_step: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_streams(streams, dp, per_step)
    assert check_streams(None, 2, 6) == 2
    assert check_streams(6, 2, 12) == 6


def test_states_that_do_not_fit_are_refused(mixed_folder: Path) -> None:
    def data(**changes: Any) -> EnergonData:
        usual = {"num_streams": 4, "shuffle_buffer": 10, "max_samples_per_sequence": 6}
        return EnergonData(**({"path": str(mixed_folder)} | usual | changes))

    stream = build(data(), 0, 2)
    next(stream)
    state = stream.state_dict()
    with pytest.raises(DataError, match=r"4 streams, this run reads 2.*data.num_streams=4"):
        build(data(num_streams=2), 0, 2).load_state_dict(state)
    with pytest.raises(DataError, match=r"lacks the streams \[1, 3\]"):
        build(data(), 1, 2).load_state_dict(state)
    with pytest.raises(DataError, match="saved inside a step on 2"):
        build(data(), 0, 4).load_state_dict(state)
    with pytest.raises(ConfigError, match="shuffle_buffer was 10 and is 11"):
        build(data(shuffle_buffer=11), 0, 2).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"max_samples_per_sequence was 6 and is 3.*set them back.*start_from"):
        build(data(max_samples_per_sequence=3), 0, 2).load_state_dict(state)
    with pytest.raises(ConfigError, match="micro_batch_size was 4 and is 2"):
        build(data(), 0, 2, mbs=2).load_state_dict(state)
    with pytest.raises(DataError, match="no data state"):
        build(data()).load_state_dict({})
    other = build(data(), 1, 2)
    with pytest.raises(DataError, match="do not belong together"):
        merge_states([state, other.state_dict()])


def test_codec_round_trip_and_closed_list() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "t": (1, ("y", b"\x00\xff")), 3: torch.arange(3), "e": b"", "d": {}}
    back = from_plain(through_disk(to_plain(value)))
    assert str(back) == str(value)
    assert type(back["t"]) is tuple
    with pytest.raises(DataError, match="cannot save"):
        to_plain(Path("x"))
    for bad in ({"$": "os.system", "value": []}, {"no": "tag"}, object()):
        with pytest.raises(DataError):
            from_plain(bad)
