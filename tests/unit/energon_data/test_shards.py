"""Shards are indexed where they are prepared."""

import multiprocessing
import os
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from small_data import spec

from energon_data.dataset import EnergonData
from energon_data.prepare.shards import ShardWriter, npy_bytes, write_energon_metadata


def test_indexing_starts_no_process_and_lists_every_sample_of_every_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked child may hold a lock that nobody will release."""

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
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if path.startswith(str(folder)))


@pytest.mark.parametrize("limit", [None, 2])
def test_no_shard_stays_open_after_it_was_read(mixed_folder: Path, tmp_path: Path, limit: int | None) -> None:
    """A run validates thousands of times, and may open a thousand files."""
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
