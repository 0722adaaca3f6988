"""Invalid content in files from strangers ends in a one-line error, within seconds and a GiB of memory."""

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

from dit.checkpoint.background.remote import RemoteStore, copy_all, fetch_newer
from dit.checkpoint.checkpointer import read_loader_state
from dit.checkpoint.manifest import MANIFEST, read_manifest, verify_folder
from dit.checkpoint.records import read_metadata, read_record
from dit.checkpoint.state_files import StateReader
from dit.convert.diffusers_format import format_of_settings
from dit.convert.state_files import read_json, read_tensors
from dit.convert.state_files import read_metadata as read_weights_metadata
from dit.encoders.vae import Geometry
from dit.errors import CheckpointError, ConfigError, DataError, UserError
from dit.safe_files import parse_yaml, read_array
from dit.sampling.prompt_file import read_prompts
from energon_data.contents import Contents
from energon_data.folder import check_folder
from energon_data.prepare.archives import read_tar
from energon_data.prepare.folders import list_folder
from energon_data.prepare.lists import LONGEST_FIELD
from energon_data.samples import SampleError, unseal
from launch.config_file import load
from launch.status import read_status
from tests.support.bounded import bounded
from tests.unit.checkpoint.checkpoints import leftovers, make_store, save

DEEP = "[" * 100_000
GIB = 1 << 30


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "metadata.json": ("metadata.json", lambda file: read_metadata(file.parent)),
    "state.json": ("state.json", lambda file: StateReader(file.parent)),
    "manifest": (MANIFEST, lambda file: read_manifest(file.parent)),
    "config of diffusers": ("config.json", read_json),
    "config of an autoencoder": ("config.json", lambda file: Geometry.read(str(file.parent))),
    "prompts": ("prompts.jsonl", read_prompts),
    "contents": ("dataset.json", lambda file: Contents.read(file.parent)),
    "data set": (".nv-meta/.info.json", lambda file: check_folder(file.parents[1], "train")),
    "list of files": ("metadata.jsonl", lambda file: list_folder(file.parent, frozenset({"png"}))),
    "config.yaml": ("config.yaml", lambda file: read_record(file.parent)),
    "--yaml": ("config.yaml", load),
}


NONSENSE = (DEEP.encode(), b"\0" * 200, b"\xff\xfe\xfd", b'{"a": 1' + b"0" * 400 + b"}", b"", None)
"""Contents of a file: nested deeply, not text, a large number, nothing; None is a pipe."""


@pytest.mark.parametrize("name", READERS)
def test_nonsense_and_pipes_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    """A fork reads all of them, because a fork of this process takes longer than a file."""
    file, read = READERS[name]
    if name == "data set":
        written(tmp_path / ".nv-meta" / "split.yaml", "split_parts: {train: [a.tar]}")
        written(tmp_path / "dataset.json", "{}")

    def refusal(content: Optional[bytes]) -> str:
        path = written(tmp_path / file, content or b"")
        if content is None:
            path.unlink()
            os.mkfifo(path)
        with pytest.raises(UserError) as caught:
            read(path)
        return str(caught.value)

    assert not any("\n" in text for text in bounded(lambda: [refusal(content) for content in NONSENSE]))


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_a_pipe_in_place_of_weights_does_not_block(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="not a regular file"):
        bounded(lambda: read_tensors(tmp_path / name))


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100])
def test_metadata_of_weights_is_read_only_from_valid_files(tmp_path: Path, content: Optional[bytes]) -> None:
    """A pipe, an empty file and a damaged file have none."""
    path = tmp_path / "adapters.safetensors"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"adapters\.safetensors cannot be read: .*give a complete file of tensors"):
        bounded(lambda: read_weights_metadata(path))


def test_the_metadata_of_a_sample_may_be_nonsense() -> None:
    for content in (DEEP.encode(), b'{"label": 1' + b"0" * 5000 + b"}"):
        with pytest.raises(SampleError, match="not JSON"):
            unseal(content)


def test_a_status_accepts_damaged_files(tmp_path: Path) -> None:
    """The lock is a pipe, and the number of steps is infinite."""
    written(tmp_path / "metrics.jsonl", '{"kind": "scalars", "step": 3, "time": 1, "attempt": 1, "samples_per_s": 1}\n')
    os.mkfifo(tmp_path / "run.lock")
    for steps in (".inf", DEEP, "[1]"):
        written(tmp_path / "config.yaml", f"training: {{num_steps: {steps}}}")
        status = bounded(lambda: read_status(tmp_path))
        assert (status.step, status.num_steps, status.running) == (3, None, None)


@pytest.mark.parametrize(
    "text", ["!!bool x", '!!int ""', "!!float x", "!!timestamp x", "!!binary é", "!!map [1]", "{[1]: 2}"]
)
def test_yaml_with_impossible_tags_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_yaml(text)


def index(folder: Path, shape: list[int], boxes: list[list[Any]]) -> Path:
    tensors = {"weight": {"shape": shape, "boxes": [["rank_00000.safetensors", *box] for box in boxes]}}
    written(folder / "state.json", json.dumps({"format": 2, "scalars": {}, "tensors": tensors}))
    return folder


def test_many_boxes_of_a_tensor_are_checked_in_seconds(tmp_path: Path) -> None:
    boxes = [[[0, i], [1, 1]] for i in range(20_000)]
    folder = index(tmp_path, [1, 20_000], boxes)
    assert bounded(lambda: list(StateReader(folder).shapes)) == ["weight"]
    boxes[1] = boxes[0]
    folder = index(tmp_path, [1, 20_000], boxes)
    with pytest.raises(CheckpointError, match="stored twice"):
        bounded(lambda: StateReader(folder))


def test_a_scalar_is_stored_once(tmp_path: Path) -> None:
    assert StateReader(index(tmp_path, [], [[[], []]])).shapes == {"weight": ()}
    for boxes, problem in (([[[], []]] * 2, "stored twice"), ([], "has 1 elements, 0 of them are stored")):
        with pytest.raises(CheckpointError, match=problem):
            StateReader(index(tmp_path, [], boxes))


def test_boxes_that_all_overlap_are_checked_in_seconds(tmp_path: Path) -> None:
    folder = index(tmp_path, [40_000], [[[0], [1]]] * 40_000)
    with pytest.raises(CheckpointError, match="stored twice"):
        bounded(lambda: StateReader(folder))


def test_a_manifest_of_too_many_names_is_refused(tmp_path: Path) -> None:
    files = {f"file{i}": [1, "0" * 64] for i in range(100_001)}
    written(tmp_path / MANIFEST, json.dumps({"format": 1, "step": 1, "created": 0, "meta": {}, "files": files}))
    with pytest.raises(CheckpointError, match="lists 100,001 files"):
        bounded(lambda: verify_folder(tmp_path))


def test_a_compressed_loader_position_is_refused(tmp_path: Path) -> None:
    """A file of half a megabyte would expand to half a gigabyte."""
    path = tmp_path / "loader" / "dp_00000.pt"
    path.parent.mkdir()
    torch.save({"next": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(content)
                for _ in range(16 if name.endswith("/data/0") else 0):
                    member.write(bytes(32 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(CheckpointError, match=r"an archive of .* that expands to"):
        bounded(lambda: read_loader_state(tmp_path), memory_bytes=256 << 20)


def archive_of(path: Path, member: tarfile.TarInfo, length: int) -> Path:
    """Write the name of a valid picture, then a header without content, in a file that is `length` bytes long."""
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    with path.open("r+b") as file:
        file.seek(512)
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        file.truncate(length)
    return path


def archives(folder: Path) -> dict[str, Path]:
    large, pax, sparse = tarfile.TarInfo("b.png"), tarfile.TarInfo("b"), tarfile.TarInfo("b.png")
    large.size, pax.size, pax.type = 1 << 50, 3 * GIB, tarfile.XHDTYPE
    sparse.type, sparse.size = tarfile.GNUTYPE_SPARSE, 0
    beyond = tarfile.TarInfo("b.png")
    beyond.size = 6 * GIB
    return {
        "a member of 1 PiB": archive_of(folder / "large.tar", large, 4096),
        "a header of 3 GiB": archive_of(folder / "pax.tar", pax, 3 * GIB + 4096),
        "a sparse file": archive_of(folder / "sparse.tar", sparse, 4096),
        "a member beyond the end": archive_of(folder / "beyond.tar", beyond, 4096),
    }


def test_an_archive_with_impossible_sizes_is_refused(tmp_path: Path) -> None:
    def last_reason(path: Path) -> str:
        items = [*read_tar(path, extensions=frozenset({"png"}), root=path)]
        return [item[1].reason for item in items if isinstance(item, tuple)][-1]

    paths = archives(tmp_path)
    reasons = bounded(lambda: {name: last_reason(path) for name, path in paths.items()})
    assert reasons == dict.fromkeys(paths, "bad_tar")


def test_arrays_must_have_the_length_in_their_header(tmp_path: Path) -> None:
    header = str({"descr": "<f8", "fortran_order": False, "shape": (10**12,)}).encode().ljust(117) + b"\n"
    path = written(tmp_path / "array.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises((OSError, ValueError)):
        bounded(lambda: read_array(path))


def test_copies_that_are_not_checkpoints_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The copies have a file longer than its record, a manifest nested too deeply, and a pipe."""
    store = make_store(tmp_path / "a" / "checkpoints", keep_last=9)
    for step in (1, 2, 3, 4):
        save(store, step)
    remote = RemoteStore(f"file://{tmp_path}/copies")
    copy_all(store, remote)
    copies = {step: tmp_path / "copies" / f"iter_{step:07d}" for step in (2, 3, 4)}
    written(copies[2] / MANIFEST, DEEP)
    (copies[3] / MANIFEST).unlink()
    os.mkfifo(copies[3] / MANIFEST)
    with (copies[4] / "state.json").open("ab") as file:
        file.truncate(64 * GIB)

    def fetch() -> tuple[int | None, list[str]]:
        other = make_store(tmp_path / "b" / "checkpoints")
        return fetch_newer(other, remote), leftovers(other)

    assert bounded(fetch) == (1, [])
    assert sorted(path.name for path in (tmp_path / "b" / "checkpoints").iterdir()) == ["iter_0000001"]


def test_sizes_of_a_checkpoints_samples_are_bounded(tmp_path: Path) -> None:
    for size in ([1, 20_000, 20_000], [1, 2**30, 2**30], [1, 10**18, 1]):
        written(tmp_path / "metadata.json", json.dumps({"class_names": None, "latent_size": size}))
        with pytest.raises(CheckpointError, match="latent_size="):
            read_metadata(tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        {"scaling_factor": 0},
        {"scaling_factor": float("nan")},
        {"scaling_factor": []},
        {"block_out_channels": "text", "latent_channels": "many"},
        {"block_out_channels": 3},
        {"block_out_channels": [8] * 100_000},
        {"latents_mean": "text", "latents_std": [0.5]},
        {"latent_channels": 10**18},
    ],
)
def test_the_settings_of_an_autoencoder_are_checked(tmp_path: Path, entries: dict[str, Any]) -> None:
    written(tmp_path / "config.json", json.dumps({"_class_name": "AutoencoderKL", **entries}))
    with pytest.raises(ConfigError, match=r"has an entry that cannot be used|has invalid sizes|is not finite"):
        bounded(lambda: Geometry.read(str(tmp_path)))


@pytest.mark.parametrize("size", [10**9, [1, 10**9]])
def test_the_sample_size_of_an_import_is_bounded(tmp_path: Path, size: Any) -> None:
    settings = {"_class_name": "DiTTransformer2DModel", "sample_size": size}
    with pytest.raises(ConfigError):
        bounded(lambda: format_of_settings(settings).read_settings(settings))


def test_the_list_of_a_data_set_may_be_nonsense(tmp_path: Path) -> None:
    written(tmp_path / "metadata.csv", "file_name,caption\n" + "a" * (LONGEST_FIELD + 1) + ",b\n")
    with pytest.raises(DataError, match=r"metadata.csv: field larger than field limit"):
        list_folder(tmp_path, frozenset({"png"}))
