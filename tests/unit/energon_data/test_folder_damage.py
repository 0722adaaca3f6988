"""Invalid entries in the files around the shards of a data set are refused by name, and use no memory."""

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from small_data import run, spec

from dit.errors import DataError
from energon_data.dataset import EnergonData
from energon_data.folder import check_dataset
from energon_data.tar_index import read_offsets

Copy = Callable[[Path], Path]
SHARD = "train-000000.tar"


def restate(file: Path, **entries: object) -> None:
    """Change entries of a JSON or YAML file."""
    as_json = file.suffix == ".json"
    content = json.loads(file.read_text()) if as_json else yaml.safe_load(file.read_text())
    file.write_text(json.dumps(content | entries) if as_json else yaml.safe_dump(content | entries))


def linked(name: str, target: str) -> Callable[[Path], object]:
    """Replace a file by a link to `target`."""
    return lambda folder: [(folder / name).unlink(), (folder / name).symlink_to(target)]


def split(**entries: object) -> Callable[[Path], None]:
    """Change entries of `split.yaml`."""
    return lambda folder: restate(folder / ".nv-meta" / "split.yaml", **entries)


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


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


_SAFE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("letters", "letters"),
        ("letters_text", "letters --text-encoder"),
        ("moving_letters", "moving_letters --text"),
        ("mine", "images --in PICTURES"),
    ],
)
def test_the_error_for_a_missing_folder_names_a_rendering_command_or_the_page(
    tmp_path: Path, folder: str, command: str
) -> None:
    with pytest.raises(DataError, match=rf"`python -m energon_data\.prepare {command}.* --out {tmp_path}/{folder}`"):
        check_dataset(str(tmp_path / folder), "train")
    with pytest.raises(DataError, match=r"does not exist; .*energon_data/README\.md.*how to write one$"):
        check_dataset(str(tmp_path / "imagenet_latents_256"), "train")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: shutil.rmtree(f), "does not exist; .*energon_data/README.md"),
        (lambda f: shutil.rmtree(f / ".nv-meta"), "no .nv-meta folder.*energon prepare"),
        (lambda f: [shutil.rmtree(f), f.mkdir()], "no .nv-meta folder"),
        (lambda f: (f / "train-000001.tar").unlink(), "train-000001.tar is missing"),
        (lambda f: (f / "train-000001.tar").write_bytes(b""), "train-000001.tar is truncated: 0 bytes"),
        (lambda f: (f / "train-000001.tar").open("r+").truncate(9000), "train-000001.tar is truncated: 9000 bytes"),
        (lambda f: (f / "train-000001.tar").open("ab").write(b"x"), "bytes but .* were written"),
        (lambda f: (f / "train-000001.tar.idx").unlink(), "no index train-000001.tar.idx"),
        (lambda f: (f / "train-000001.tar.idx").open("r+").truncate(20), "lists 1 samples, the metadata 16"),
        (linked(SHARD, __file__), "link to a file outside"),
        (_write(".nv-meta/sample_loader.py", "print('executed')"), "sample_loader.py.*would execute"),
        (_write(".nv-meta/dataset.yaml", "__module__: os\n__class__: system\n"), "names os.system"),
        (_write(".nv-meta/dataset.yaml", _SAFE + "sample_loader: sample_loader.py:f\n"), "must contain only"),
        (_write(".nv-meta/dataset.yaml", _SAFE + "part_filter: x.py:f\n"), "must contain only"),
        (_write(".nv-meta/dataset.yaml", _SAFE + "subflavors: {a: {__module__: os, __class__: x}}"), "only megatron"),
        (_write(".nv-meta/dataset.yaml", "!!python/object/apply:os.getcwd []"), "cannot be read"),
        (_write(".nv-meta/.info.json", "{"), "info.json cannot be read"),
        (_write(".nv-meta/.info.json", "{}"), "no valid .info.json"),
        (lambda f: restate(f / ".nv-meta/.info.json", shard_counts={SHARD: 16}), "lacks the number of samples"),
        (_write(".nv-meta/split.yaml", "split_parts: {val: []}"), r"no split 'train', only \['val'\]"),
        (_write(".nv-meta/split.yaml", "split_parts: {train: []}"), "is empty"),
        (_write(".nv-meta/split.yaml", "split_parts: {train: [../evil.tar]}"), "outside the data set"),
        (_write(".nv-meta/split.yaml", "split_parts: {train: [/tmp/evil.tar]}"), "outside the data set"),
        (linked(SHARD, SHARD), f"{SHARD} is missing"),
        (linked(".nv-meta/dataset.yaml", "/dev/zero"), r"dataset\.yaml cannot be read.*regular file"),
        (linked(f"{SHARD}.idx", "/dev/zero"), f"{SHARD} has no index"),
        (split(split_parts={"train": [SHARD], "val": [3]}), r"'val' in .*split\.yaml is \[3\], and must be a list of"),
        (split(split_parts={"train": 0.5}), r"'train' in .*split\.yaml is 0\.5"),
        (split(exclude=["{0..99999}{a,b}{0..99999}"]), r"'exclude' in .*split\.yaml names more than 10,000,000 shards"),
        (split(exclude=["{0.." + "9" * 10_000 + "}"]), r"'exclude' in .*split\.yaml: "),
        (_write("dataset.json", "[]"), r"dataset\.json is not a valid description of a data set"),
        (
            lambda f: restate(f / "dataset.json", shards={SHARD: 3}),
            f"dataset.json has no valid entry for shard '{SHARD}'",
        ),
    ],
)
def test_a_damaged_folder_is_refused_before_reading(
    mixed_folder: Path, copy_of: Copy, damage: Callable[[Path], None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(mixed_folder)
    EnergonData(path=str(folder)).validate(spec(), 1, 1)
    damage(folder)
    for check in (lambda d: d.validate(spec(), 1, 1), lambda d: run(Path(d.path))):
        with pytest.raises(DataError, match=words):
            check(EnergonData(path=str(folder)))
    assert "executed" not in capsys.readouterr().out
