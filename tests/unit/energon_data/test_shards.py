"""Preparation indexes the shards, and streams open and identify them."""

import io
import json
import multiprocessing
import os
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import clips, spec, write_dataset

from dit import safe_files
from energon_data.dataset import EnergonData
from energon_data.folder import identity
from energon_data.prepare.shards import ShardWriter, npy_bytes, write_energon_metadata


def test_indexing_starts_no_process_and_lists_every_sample_of_every_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked child may inherit a lock that no process releases."""

    def refuse(self: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.Process, "start", refuse)
    writer = ShardWriter(tmp_path, "train", 2)
    for number in range(5):
        writer.add(f"sample{number}", {}, {"latent.npy": npy_bytes(np.zeros(3))})
    writer.close()
    shards = sorted(path.name for path in tmp_path.glob("*.tar"))
    assert len(shards) == 3
    write_energon_metadata(tmp_path, shards, ["train"])
    with sqlite3.connect(tmp_path / ".nv-meta" / "index.sqlite") as index:
        rows = index.execute("SELECT tar_file_id, sample_key FROM samples ORDER BY sample_key").fetchall()
    assert rows == [(number // 2, f"sample{number}") for number in range(5)]


def open_shards(folder: Path) -> list[str]:
    """Return the shards of a folder that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if path.startswith(str(folder)))


@pytest.mark.parametrize("limit", [None, 2])
def test_shards_are_closed_after_reading(mixed_folder: Path, tmp_path: Path, limit: int | None) -> None:
    """A run validates thousands of times, but may open only about a thousand files."""
    folder = tmp_path / "data"
    shutil.copytree(mixed_folder, folder)  # other tests may have files of the shared folder open
    data = EnergonData(path=str(folder), validation_samples=limit)
    for _ in range(2):
        for _ in data.build_validation(spec(), dp_rank=0, dp_size=1):
            assert open_shards(folder)
        assert open_shards(folder) == []
    stream = data.build_train(spec(), dp_rank=0, dp_size=1, seed=0, log_dir=None)
    next(stream)
    assert open_shards(folder)
    stream.close()
    assert open_shards(folder) == []


def noise(count: int, seed: int) -> list[Any]:
    """Return samples of the same sizes, with other texts for each seed."""
    return list(clips(count, sizes=[(1, 4, 4)], seed=seed))


def test_the_identity_of_a_folder_depends_on_its_shards_and_not_on_its_path(tmp_path: Path) -> None:
    """Folders differ in the number of samples and shards, or only in the bytes of samples of the same sizes."""

    def identity_of(name: str) -> str:
        return EnergonData(path=str(tmp_path / name)).identity()["path"][f"{tmp_path / name} (train)"]

    write_dataset(tmp_path / "one", {"train": noise(40, 0)})
    write_dataset(tmp_path / "same", {"train": noise(40, 0)})
    write_dataset(tmp_path / "other", {"train": noise(40, 1)})
    write_dataset(tmp_path / "fewer", {"train": noise(16, 0)})
    assert identity_of("one") == identity_of("same")
    assert identity_of("one").startswith("40 samples in 3 shards, digest ")
    assert identity_of("fewer").startswith("16 samples in 1 shard, digest ")
    assert identity_of("other").startswith("40 samples in 3 shards, digest ")
    assert identity_of("other") != identity_of("one")


def test_the_identity_changes_with_a_shard_that_was_rewritten_or_a_sha256(tmp_path: Path) -> None:
    """Size and `dataset.json` of the rewritten shard are unchanged; in the last case only the SHA-256 differs."""
    folder = write_dataset(tmp_path / "data", {"train": noise(40, 0)})
    description = json.loads((folder / "dataset.json").read_text())
    shard = sorted(folder.glob("*.tar"))[1]
    identities = [identity(str(folder), "train")]
    for offset in (0, shard.stat().st_size - 1):
        with shard.open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff")
        identities.append(identity(str(folder), "train"))
    description["shards"][shard.name]["sha256"] = "0" * 64
    (folder / "dataset.json").write_text(json.dumps(description))
    identities.append(identity(str(folder), "train"))
    assert len(set(identities)) == 4


def without_digests(folder: Path) -> Path:
    """Remove the SHA-256 of the shards from `dataset.json`, as if another program had written it."""
    description = json.loads((folder / "dataset.json").read_text())
    for shard in description["shards"].values():
        del shard["sha256"]
    (folder / "dataset.json").write_text(json.dumps(description))
    return folder


@pytest.mark.parametrize("name", ["dataset.json", "no dataset.json"])
def test_the_identity_of_shards_without_sha256_changes_with_their_bytes(tmp_path: Path, name: str) -> None:
    """The identity includes bytes at some offsets, because names and sizes of the data are equal."""
    found = {}
    for place, seed in (("one", 0), ("same", 0), ("other", 1)):
        folder = without_digests(write_dataset(tmp_path / place, {"train": noise(40, seed)}))
        if name == "no dataset.json":
            (folder / "dataset.json").unlink()
        found[place] = identity(str(folder), "train")
    sizes = [[path.stat().st_size for path in sorted((tmp_path / p).glob("*.tar"))] for p in ("one", "other")]
    assert sizes[0] == sizes[1]
    assert found["one"] == found["same"] != found["other"]


def test_the_identity_of_a_large_shard_without_sha256_costs_a_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = without_digests(write_dataset(tmp_path / "data", {"train": noise(8, 0)}))
    (shard,) = folder.glob("*.tar")
    (folder / "dataset.json").unlink()
    os.truncate(shard, 1 << 30)
    before, read, open_binary = identity(str(folder), "train"), [0], safe_files.open_binary

    class Counted(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            content = super().read(size)
            read[0] += len(content)
            return content

    def counted(path: Path) -> Any:
        return Counted(path) if path == shard else open_binary(path)

    for offset in (0, 1 << 28, 1 << 29, 3 << 28, (1 << 30) - 2000):
        with shard.open("r+b") as file:
            file.seek(offset + 1000)
            file.write(b"x")
        with monkeypatch.context() as patched:
            patched.setattr("energon_data.folder.open_binary", counted)
            after = identity(str(folder), "train")
        assert after != before
        before = after
    assert 0 < read[0] <= 4 * (256 << 10)


def test_the_identity_of_a_blend_names_each_folder_and_held_out_split(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", {"train": noise(8, 0), "val": noise(4, 1)})
    b = write_dataset(tmp_path / "b", {"train": noise(9, 0)})
    data = EnergonData(blend=[{"path": str(a)}, {"path": str(b)}])
    found = data.identity()
    assert {name: text.partition(",")[0] for name, text in found["blend"].items()} == {
        f"{a} (train)": "8 samples in 1 shard",
        f"{b} (train)": "9 samples in 1 shard",
    }
    assert [*found["validation_split"]] == [f"{a} (val)"]
