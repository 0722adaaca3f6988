"""Damaged data are refused or counted, by name; no data set can execute code or point outside of its folder."""

import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import clips, damage, first_batch, npy, run, spec, write_dataset

from dit.errors import ConfigError, DataError, exit_code
from energon_data import tar_index
from energon_data.dataset import EnergonData
from energon_data.decoder import decode_sample, read_npy
from energon_data.prepare.shards import ShardWriter, write_energon_metadata
from energon_data.samples import SampleError, checksum, seal, unseal

Copy = Callable[[Path], Path]


KEY, SHARD = "train_clip00020", "train-000001.tar"


@pytest.mark.parametrize("background", [False, True])
def test_a_flipped_bit_ends_the_run_and_names_the_sample(mixed_folder: Path, copy_of: Copy, background: bool) -> None:
    folder = copy_of(mixed_folder)
    shard = damage(folder, KEY)
    with pytest.raises(DataError) as caught:
        run(folder, background=background)
    message = str(caught.value)
    for words in (KEY, shard.name, "checksum", "latent.npy", "Damaged samples: 1, allowed: 0", "max_lost_samples"):
        assert words in message
    assert "Traceback" not in message
    assert exit_code(caught.value) == 3


@pytest.mark.parametrize("long", [False, True])
def test_a_name_that_is_not_utf8_is_a_damaged_sample_with_a_cure(
    mixed_folder: Path, copy_of: Copy, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old archivers write names in the encoding of their system; `tarfile` reads long names."""
    folder = copy_of(mixed_folder)
    shard = folder / SHARD
    data, name = bytearray(shard.read_bytes()), KEY.encode()
    start = data.find(name)
    while start >= 0:
        data[start + len(name) - 1] = 0xE9
        header = data[start : start + 512]
        header[148:156] = b" " * 8
        data[start + 148 : start + 156] = b"%06o\0 " % sum(header)
        start = data.find(name, start)
    shard.write_bytes(data)
    if long:
        monkeypatch.setattr(tar_index, "parse_members", lambda _: (_ for _ in ()).throw(tar_index.UnusualTarError))
    with pytest.raises(DataError, match=rf"{shard.name}.*'train_clip0002\\xe9.*is not UTF-8; rename it"):
        run(folder, background=not long)


def test_a_read_of_a_part_of_the_bytes_is_continued(mixed_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read returns at most 2 GiB, and less if the file system or a signal ends it."""
    whole, read = run(mixed_folder, 6, background=False), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:700]], at))
    assert run(mixed_folder, 6, background=False) == whole


def test_every_flipped_bit_in_metadata_or_latent_is_detected() -> None:
    parts = {"latent.npy": npy(np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3))}
    sealed = seal({"label": 16, "caption": "Q"}, parts)
    decode_sample("k", {"json": sealed, **parts}, require_checksums=True)
    for name, content in {"json": sealed, **parts}.items():
        for position in range(len(content)):
            for bit in (1, 64):
                broken = bytearray(content)
                broken[position] ^= bit
                with pytest.raises(SampleError):
                    decode_sample("k", {"json": sealed, **parts, name: bytes(broken)}, require_checksums=True)


def test_the_error_budget_counts_each_dropped_sample_once_with_key_shard_and_reason(
    mixed_folder: Path, copy_of: Copy, tmp_path: Path
) -> None:
    folder = copy_of(mixed_folder)
    damaged = {"train_clip00003": "latent.npy", "train_clip00020": "text.npy", "train_clip00050": "json"}
    shards = {key: damage(folder, key, part, position=-3).name for key, part in damaged.items()}
    # 75 - 3 samples are one epoch of 18 micro-batches.
    keys, skipped = run(folder, 18, max_lost_samples=3, log_dir=tmp_path / "run")
    assert len(set(keys)) == len(keys) == 72
    assert not set(keys) & set(damaged)
    assert sum(skipped.values()) == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "data_skipped.jsonl").read_text().splitlines()]
    assert {line["key"] for line in lines} == set(damaged)
    for line in lines:
        assert line["shard"] == shards[line["key"]]
        assert line["lost"]
        assert line["reason"] in skipped
    with pytest.raises(DataError, match="Damaged samples: 3, allowed: 2"):
        run(folder, 18, max_lost_samples=2)


@pytest.mark.parametrize(
    "packing", [{}, {"max_tokens_per_pack": 64, "packing_buffer_size": 16}], ids=["dense", "packed"]
)
def test_counts_are_exact_in_the_background_and_after_a_resume(
    mixed_folder: Path, copy_of: Copy, packing: dict[str, Any]
) -> None:
    folder = copy_of(mixed_folder)
    for key in ("train_clip00003", "train_clip00020", "train_clip00050"):
        damage(folder, key)
    data = EnergonData(path=str(folder), shuffle_buffer=0, max_lost_samples=99, **packing)
    s = spec(micro_batch_size=1 if packing else 4)

    def build(background: bool) -> Any:
        data.background = background
        return data.build_train(s, dp_rank=0, dp_size=1, seed=0, log_dir=None)

    stream = build(False)
    counts = []
    for _ in range(30):
        next(stream)
        counts.append(stream.sample_counts().by_reason().get("checksum", 0))
    assert counts[-1] >= 3
    worker = build(True)
    try:
        for count in counts[:9]:
            next(worker)
            assert worker.sample_counts().by_reason().get("checksum", 0) == count
        resumed = build(False)
        resumed.load_state_dict(worker.state_dict())
    finally:
        worker.close()
    for count in counts[9:]:
        next(resumed)
        assert resumed.sample_counts().by_reason().get("checksum", 0) == count


class _Touch:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize(
    "part", ["text.pyd", "text.pkl", "text.pickle", "text.pth", "text.pt", "latent.npy", "x.weird"]
)
def test_pickles_are_refused_and_not_executed(tmp_path: Path, part: str) -> None:
    marker = tmp_path / "executed"
    payload = pickle.dumps(_Touch(marker))
    if part == "latent.npy":
        payload = npy(np.array([_Touch(marker)], dtype=object))
    pickle.loads(pickle.dumps(_Touch(tmp_path / "proof")))
    assert (tmp_path / "proof").exists(), "the payload works"

    folder = write_dataset(tmp_path / "data", {"train": _sample_of({"parts": {part: payload}})})
    with pytest.raises(DataError, match=r"train_clip00005.*(pickle|unknown format)"):
        run(folder)
    assert not marker.exists()


def test_the_npy_reader_equals_numpy_and_refuses_other_formats() -> None:
    for dtype in (np.float32, np.float16, np.int64, np.uint8, ">f4", bool):
        for array in (
            np.arange(12).reshape(3, 4),
            np.asfortranarray(np.arange(12).reshape(3, 4)),
            np.array(3),
            np.zeros((0, 2)),
        ):
            written = npy(array.astype(dtype))
            read = read_npy(written)
            np.testing.assert_array_equal(read, array.astype(dtype))
            assert read.dtype == np.dtype(dtype)
            for cut in (3, 9, 40, len(written) - 1):
                if cut < len(written):
                    with pytest.raises(SampleError, match="unreadable"):
                        read_npy(written[:cut])
    with pytest.raises(SampleError, match="unreadable"):
        read_npy(npy(np.arange(3)) + b"more")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not an object"),
        (b'{"label": 1}', "has no checksums"),
        (b'{"crc32": {"latent.npy": "00000000"}}', "no checksum for itself"),
    ],
)
def test_metadata_without_valid_checksums_is_refused(content: bytes, words: str) -> None:
    parts = {"json": content, "latent.npy": npy(np.zeros((1, 1, 2, 2), np.float32))}
    with pytest.raises(SampleError, match=words):
        decode_sample("k", parts, require_checksums=True)


def test_checksums_that_exist_are_verified_even_when_not_required() -> None:
    part = npy(np.zeros(3))
    decode_sample("k", {"json": b'{"label": 1}', "latent.npy": part}, require_checksums=False)
    right = json.dumps({"crc32": {"latent.npy": checksum(part)}}).encode()
    decode_sample("k", {"json": right, "latent.npy": part}, require_checksums=False)
    with pytest.raises(SampleError, match="CRC32"):
        decode_sample("k", {"json": right, "latent.npy": part[:-1] + b"x"}, require_checksums=False)
    with pytest.raises(SampleError, match="not in the shard"):
        decode_sample("k", {"json": right}, require_checksums=False)
    with pytest.raises(DataError, match="rename the key"):
        seal({"crc32": 1}, {})
    assert unseal(seal({"a": {"json": "00000000"}}, {}))["a"] == {"json": "00000000"}


@pytest.mark.parametrize("key", ["../evil", "/etc/evil", "a/../../evil", "..\\evil"])
def test_names_outside_the_folder_are_refused(key: str) -> None:
    with pytest.raises(SampleError, match="outside"):
        decode_sample(key, {"json": seal({}, {})}, require_checksums=True)


def _sample_of(changes: dict[str, Any]) -> Any:
    for key, meta, parts in clips(12, sizes=[(1, 4, 4)]):
        if key == "clip00005":
            meta, parts = meta | changes.get("meta", {}), parts | changes.get("parts", {})
            parts = {name: data for name, data in parts.items() if data is not None}
        yield key, meta, parts


def _latent(value: float, shape: tuple[int, ...] = (2, 1, 4, 4)) -> dict[str, Any]:
    array = np.zeros(shape, np.float32)
    array.flat[0] = value
    return {"parts": {"latent.npy": npy(array)}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (_latent(np.nan), "not_finite"),
        (_latent(-np.inf), "not_finite: latent values reach inf"),
        (_latent(-1001), "reach 1001, must be at most 1000"),
        (_latent(0, (3, 1, 4, 4)), "3 channels, the model 2"),
        (_latent(0, (2, 1, 5, 4)), "cannot be cut into patches"),
        (_latent(0, (2, 4)), r"expected \[C, T, H, W\]"),
        ({"parts": {"latent.npy": None}}, "no latent"),
        ({"parts": {"text.npy": None}}, "no text.npy"),
        ({"parts": {"text.npy": npy(np.zeros((3, 4), np.float32))}}, "width 4, the model takes width 3"),
        ({"meta": {"label": None}}, "stores no label"),
        ({"meta": {"fps": 0}}, "fps is 0, must be 0.001 to"),
    ],
)
def test_a_sample_that_does_not_fit_is_named_with_the_numbers(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = write_dataset(tmp_path / "data", {"train": _sample_of(changes)})
    with pytest.raises(DataError, match=rf"train_clip00005.*{words}"):
        run(folder)
    keys, skipped = run(folder, 5, max_lost_samples=9)
    assert "train_clip00005" not in keys
    assert sum(skipped.values()) >= 1


WRONG_METADATA = {
    "loss_weight": [math.nan, math.inf, -math.inf, 1e30, -1e-3, -5, True, "2", [1.0], {}, 10**18],
    "label": [3.7, math.nan, math.inf, True, False, "3", [3], -0.5],
    "fps": [-24, 0, -0.0, math.nan, math.inf, True, "24", 1e30, 1e-300, 10**18],
    "framerate": [-24, "24", math.nan],
    "aesthetic_score": ["high", math.nan, math.inf, True, [5]],
}
WRONG_LABELS = [10, -1, 10**18, 1e300]
WRONG_PARTS = {
    "latent": (np.complex64, np.complex128, np.int64, np.uint8, bool, "U3", "datetime64[s]", ">f4"),
    "text": (np.complex64, np.int64, bool),
}


def test_metadata_and_types_out_of_range_have_separate_reasons(tmp_path: Path) -> None:
    """Each such sample counts as one lost sample; its line in the skip log has the reason and the entry."""
    wrong: dict[str, tuple[str, str]] = {}

    def samples() -> Any:
        _, _, sound = next(iter(clips(1, sizes=[(1, 4, 4)])))
        usual = {"label": 3, "aesthetic_score": 5}
        entries = [(name, value, "metadata") for name, values in WRONG_METADATA.items() for value in values]
        for i, (name, value, reason) in enumerate(entries + [("label", value, "label") for value in WRONG_LABELS]):
            wrong[f"train_wrong{i:03d}"] = (reason, name)
            yield f"wrong{i:03d}", usual | {name: value}, sound
        for part, dtypes in WRONG_PARTS.items():
            shape = {"latent": (2, 1, 4, 4), "text": (2, 3)}[part]
            for i, dtype in enumerate(dtypes):
                wrong[f"train_{part}{i}"] = ("wrong_part", part)
                yield f"{part}{i}", usual, sound | {f"{part}.npy": npy(np.zeros(shape, dtype))}
        for i, (key, _, parts) in enumerate(clips(8, sizes=[(1, 4, 4)])):
            weights = {"loss_weight": (0, 1000, 0.25, 7)[i]} if i < 4 else {}
            yield key, {**usual, "label": float(i), "fps": 23.976, **weights}, parts  # 3.0 is an integer

    folder = write_dataset(tmp_path / "data", {"train": samples()}, per_shard=999)
    settings = {"min_aesthetic_score": 1.0, "log_dir": tmp_path / "run"}
    keys, _ = run(folder, 2, max_lost_samples=len(wrong), **settings)
    assert {key[:10] for key in keys} == {"train_clip"}
    assert len(set(keys)) == 8
    lines = {line["key"]: line for line in map(json.loads, (tmp_path / "run" / "data_skipped.jsonl").open())}
    assert {key: line["reason"] for key, line in lines.items()} == {key: reason for key, (reason, _) in wrong.items()}
    assert [key for key, (_, name) in wrong.items() if not lines[key]["lost"] or name not in lines[key]["detail"]] == []
    with pytest.raises(DataError, match=f"Damaged samples: {len(wrong)}, allowed: {len(wrong) - 1}"):
        run(folder, 2, max_lost_samples=len(wrong) - 1, min_aesthetic_score=1.0)


def test_pooled_texts_are_read_and_required(tmp_path: Path) -> None:
    """A model with pooled text gets the vector of each sample; a missing vector or another width is refused."""

    def first(folder: Path, size: int) -> Any:
        return first_batch(EnergonData(path=str(folder)), spec(pooled_size=size))

    samples = enumerate(clips(12, sizes=[(1, 4, 4)]))
    pooled = [(key, meta, parts | {"pooled.npy": npy(np.full(5, i, np.float16))}) for i, (key, meta, parts) in samples]
    folder = write_dataset(tmp_path / "data", {"train": pooled})
    batch = first(folder, 5)
    assert batch.conditions["pooled"].values.tolist() == [[float(key[-5:])] * 5 for key in batch.keys]
    with pytest.raises(DataError, match="pooled text has width 5, the model takes width 6"):
        first(folder, 6)
    with pytest.raises(DataError, match=r"no pooled\.npy"):
        first(write_dataset(tmp_path / "bare", {"train": clips(12, sizes=[(1, 4, 4)])}), 5)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((1, 3), np.float32), r"pooled text has shape \[1, 3\], must be \[width\]"),
        (np.zeros(3, np.complex128), "pooled holds torch.complex128"),
        (np.zeros(3, np.int8), "pooled holds torch.int8"),
        (np.full(3, np.nan, np.float32), "pooled text reach nan"),
    ],
)
def test_damage_of_a_condition_counts_only_for_models_with_the_condition(
    tmp_path: Path, array: np.ndarray, words: str
) -> None:
    samples = [(key, meta, {**parts, "pooled.npy": npy(array)}) for key, meta, parts in clips(8, sizes=[(1, 4, 4)])]
    data = EnergonData(path=str(write_dataset(tmp_path / "data", {"train": samples})), shuffle_buffer=0)
    with pytest.raises(DataError, match=words):
        first_batch(data, spec(pooled_size=3))
    assert set(first_batch(data, spec()).conditions) == {"label", "context", "fps"}


def test_fewer_samples_than_streams_are_refused(mixed_folder: Path) -> None:
    message = r"has 75 samples in split 'train', fewer than data\.num_streams=76; set fewer streams, or use more data"
    with pytest.raises(ConfigError, match=message):
        EnergonData(path=str(mixed_folder), num_streams=76).validate(spec(), 1, 76)
    EnergonData(path=str(mixed_folder), num_streams=75).validate(spec(), 1, 75)


def test_dropping_everything_ends_instead_of_looping(mixed_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_data.skip_log.GIVE_UP_AFTER", 150)
    with pytest.raises(DataError, match=r"too many samples were dropped.*'aesthetic_score': 150"):
        run(mixed_folder, min_aesthetic_score=2.0)


@pytest.mark.parametrize("background", [False, True])
def test_damage_after_the_check_is_counted_not_fatal_to_the_budget(
    mixed_folder: Path, copy_of: Copy, background: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Headers are overwritten after the check: the error names the lost samples, and all others are read."""
    folder = copy_of(mixed_folder)
    with (folder / "train-000002.tar").open("r+b") as shard:
        shard.write(b"\xff" * 100)
    with pytest.raises(DataError, match=r"'#0' in shard 'train-000002.tar': unreadable: .*header.*checksum"):
        run(folder, background=background)
    keys, skipped = run(folder, 18, max_lost_samples=1, background=background)
    assert len(set(keys)) == 72
    assert skipped == {"unreadable": 1}
    assert capfd.readouterr().out == ""


def test_the_writer_refuses_names_that_cannot_be_read(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", 4)
    for key in ("", "a.b"):
        with pytest.raises(DataError, match="must not be empty or contain a dot"):
            writer.add(key, {}, {})


def test_two_samples_of_one_name_are_refused(tmp_path: Path) -> None:
    """The writer refuses this within a split, and the indexer between splits."""
    writer = ShardWriter(tmp_path, "train", 4)
    writer.add("same", {}, {})
    with pytest.raises(DataError, match=r"two samples of split 'train' are called 'same'; use different names"):
        writer.add("same", {}, {})
    writer.close()
    other = ShardWriter(tmp_path, "val", 4)
    other.add("same", {}, {})
    other.close()
    with pytest.raises(DataError, match=r"duplicate key.*\"same\".*names of samples must be unique"):
        write_energon_metadata(tmp_path, {**writer.shards, **other.shards}, ["train", "val"])


def test_samples_are_counted_by_kind_and_after_a_resume(tmp_path: Path) -> None:
    """Clips with more tokens than a pack are dropped, so only images count as used."""
    folder = write_dataset(tmp_path / "data", {"train": clips(48, sizes=[(1, 4, 4), (4, 8, 8), (1, 4, 4)])})
    data = EnergonData(path=str(folder), shuffle_buffer=0, max_tokens_per_pack=32, packing_buffer_size=8)
    s = spec(micro_batch_size=1)
    stream = data.build_train(s, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    batches = [next(stream) for _ in range(6)]
    counts = stream.sample_counts()
    assert counts.used == {"image": sum(batch.layout.num_samples for batch in batches)}
    assert set(counts.dropped) == {("too_long", "clip")}
    assert "64 tokens" in counts.examples["too_long"]
    resumed = data.build_train(s, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    resumed.load_state_dict(stream.state_dict())
    assert (resumed.sample_counts().used, resumed.sample_counts().dropped) == (counts.used, counts.dropped)
