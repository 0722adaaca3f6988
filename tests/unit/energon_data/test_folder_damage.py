"""Nonsense around the shards of a data set is refused by name, and costs no memory."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from small_data import spec

from dit.errors import DataError
from energon_data.dataset import EnergonData
from energon_data.tar_index import read_offsets

Copy = Callable[[Path], Path]
SHARD = "train-000000.tar"


def restate(file: Path, **entries: object) -> None:
    """Change entries of a JSON or YAML file."""
    as_json = file.suffix == ".json"
    content = json.loads(file.read_text()) if as_json else yaml.safe_load(file.read_text())
    file.write_text(json.dumps(content | entries) if as_json else yaml.safe_dump(content | entries))


def linked(name: str, target: str) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return act


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard that links to itself": (linked(SHARD, SHARD), rf"{SHARD} is missing"),
    "metadata without end": (
        linked(".nv-meta/dataset.yaml", "/dev/zero"),
        r"dataset\.yaml cannot be read.*regular file",
    ),
    "an index without end": (linked(f"{SHARD}.idx", "/dev/zero"), rf"{SHARD} has no index"),
    "numbers for names": (
        lambda folder: restate(folder / ".nv-meta" / "split.yaml", split_parts={"train": [SHARD], "val": [3]}),
        r"'val' in .*split\.yaml is \[3\], and must be a list of shards",
    ),
    "not a list": (
        lambda folder: restate(folder / ".nv-meta" / "split.yaml", split_parts={"train": 0.5}),
        r"'train' in .*split\.yaml is 0\.5",
    ),
    "shards without end": (
        lambda folder: restate(folder / ".nv-meta" / "split.yaml", exclude=["{0..99999}{a,b}{0..99999}"]),
        r"'exclude' in .*split\.yaml names more than 10,000,000 shards",
    ),
    "a number of ten thousand digits": (
        lambda folder: restate(folder / ".nv-meta" / "split.yaml", exclude=["{0.." + "9" * 10_000 + "}"]),
        r"'exclude' in .*split\.yaml: ",
    ),
    "no description": (
        lambda folder: (folder / "dataset.json").write_text("[]"),
        r"dataset\.json is not a valid description of a data set",
    ),
    "a shard of no size": (
        lambda folder: restate(folder / "dataset.json", shards={SHARD: 3}),
        rf"dataset\.json has no valid entry for shard '{SHARD}'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_nonsense_is_refused_by_name(mixed_folder: Path, copy_of: Copy, damage: str) -> None:
    folder, (act, words) = copy_of(mixed_folder), DAMAGE[damage]
    act(folder)
    with pytest.raises(DataError, match=words):
        EnergonData(path=str(folder)).validate(spec(), 1, 1)


def test_a_folder_that_energon_cannot_open_is_refused_with_its_message(mixed_folder: Path, copy_of: Copy) -> None:
    folder = copy_of(mixed_folder)
    restate(folder / ".nv-meta" / ".info.json", energon_version=True)
    with pytest.raises(DataError, match=rf"Energon cannot open {re.escape(str(folder))}: JsonValueError: .*version"):
        EnergonData(path=str(folder)).build_train(spec(), dp_rank=0, dp_size=1, seed=0, log_dir=None)


@pytest.mark.parametrize("offsets", [(0, 2**63), (0, 2**64 - 1), (0, 1024, 512), (512, 1024), (0, 100)])
def test_offsets_that_no_shard_has_are_refused(tmp_path: Path, offsets: tuple[int, ...]) -> None:
    (tmp_path / "a.tar.idx").write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))
    with pytest.raises(DataError, match="do not ascend from 0"):
        read_offsets(tmp_path / "a.tar")


def test_sound_offsets_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.tar.idx").write_bytes(struct.pack("<3Q", 0, 1024, 2**62))
    assert read_offsets(tmp_path / "a.tar").tolist() == [0, 1024, 2**62]
