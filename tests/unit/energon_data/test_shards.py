"""Shards are indexed where they are prepared."""

import multiprocessing
import sqlite3
from pathlib import Path

import numpy as np
import pytest

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
