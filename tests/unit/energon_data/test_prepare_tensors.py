"""Archives of older systems become data sets of the same bits; nothing that a pickle says is run."""

import io
import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from preparations import samples
from small_data import spec

from dit.batch import pixel_values
from dit.errors import EXIT_CONFIG, EXIT_DATA, DataError
from energon_data.dataset import EnergonData
from energon_data.folder import check_folder
from energon_data.media_files import open_picture, pixels_of
from energon_data.prepare.__main__ import main
from energon_data.prepare.safe_pickle import read_pickle, read_torch_file
from energon_data.prepare.tensors import list_archives
from energon_data.samples import SampleError

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


def torch_file(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_and_arrays_come_back_to_the_bit(protocol: int) -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    values: dict[str, Any] = {
        "float32": tensor,
        "bf16": tensor.bfloat16(),
        "view": tensor[1:, ::2],
        "array": tensor.numpy(),
        "half": tensor.numpy().astype(np.float16),
        "fortran": np.asfortranarray(tensor.numpy()),
        "counts": np.arange(5),
    }
    nested = {"a": [values["float32"], {"b": values["array"]}], "text": "x", "number": 1.5}
    for value in values.values():
        found = read_pickle(pickle.dumps(value, protocol))
        assert type(found) is type(value)
        assert found.dtype == value.dtype
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(value))
    found = read_pickle(pickle.dumps(nested, protocol))
    assert torch.equal(found["a"][0], tensor)
    assert np.array_equal(found["a"][1]["b"], tensor.numpy())
    assert (found["text"], found["number"]) == ("x", 1.5)


class Runs:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


class LoadsInside:
    """A pickle whose tensor storage is a file of torch that holds another pickle."""

    def __init__(self, inner: bytes) -> None:
        self.inner = inner

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.inner,)


class ObjectType:
    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("O",)


def hostile(marker: Path) -> dict[str, bytes]:
    objects = np.empty(1, object)
    objects[0] = Runs(marker)
    return {
        "call": pickle.dumps(Runs(marker)),
        "in a list": pickle.dumps([torch.zeros(2), Runs(marker)]),
        "in an array": pickle.dumps(objects),
        "in a storage": pickle.dumps(LoadsInside(torch_file(Runs(marker)))),
        "object type": pickle.dumps(ObjectType()),
        "eval": b"cbuiltins\neval\n(S'__import__(\"os\").mkdir(%r)'\ntR." % str(marker).encode(),
        "getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR.",
        "persistent": b"Pmodule\n.",
        "cut": pickle.dumps(torch.zeros(9))[:-20],
        "empty": b"",
        "deep": b"(" * 10_000,
    }


@pytest.mark.parametrize("name", hostile(Path("x")))
def test_nothing_is_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "was_here"
    payload = hostile(marker)[name]
    with pytest.raises(SampleError):
        read_pickle(payload)
    with pytest.raises(SampleError):
        read_torch_file(payload)
    assert not marker.exists()


def test_a_file_of_torch_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "was_here"
    with pytest.raises(SampleError):
        read_torch_file(torch_file([Runs(marker)]))
    assert not marker.exists()
    value = torch.randn(2, 3).bfloat16()
    assert torch.equal(read_torch_file(torch_file(value)), value)


def archive_of_nemo(folder: Path) -> tuple[Path, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """An image, a clip and a hostile sample, as NeMo's and DFM's preparations write them."""
    generator = torch.Generator().manual_seed(0)
    image, clip = (torch.randn(2, t, 4, 6, generator=generator).bfloat16() for t in (1, 3))
    text = torch.zeros(1, 16, 3).bfloat16()
    text[:, :5] = torch.randn(1, 5, 3, generator=generator).bfloat16()
    array = np.random.default_rng(0).standard_normal((4, 3), np.float32)
    members = {
        "000000.pth": torch_file(image[None]),
        "000000.pickle": pickle.dumps(text),
        "000000.json": json.dumps({"image_height": 32, "image_width": 48, "aesthetic_score": 5.5}).encode(),
        "000001.pth": torch_file(clip),
        "000001.pickle": pickle.dumps([array, "other"]),
        "000001.json": json.dumps({"height": 32, "width": 48, "framerate": 24, "num_frames": 3}).encode(),
        "000002.pth": torch_file(Runs(folder / "was_here")),
        "000002.json": b"{}",
        "000003.json": b"{}",
    }
    write_tar(folder / "rank0-000000.tar", members)
    return folder, {"000000": (image, text[0, :5]), "000001": (clip, torch.from_numpy(array))}


def test_archives_of_nemo_are_rewritten_to_the_bit_and_train(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in").mkdir()
    source, expected = archive_of_nemo(tmp_path / "in")
    out = tmp_path / "out"
    words = ["tensors", "--in", str(source), "--out", str(out), "--validation", "0", "--text-encoder", "t5-11b"]
    assert main([*words, "--vae", "cosmos", "--processes", "1"]) == 0
    assert "skipped, pickled: 1" in capsys.readouterr().out
    assert not (source / "was_here").exists()
    found = {metadata["source"].rpartition("/")[2]: (metadata, clip) for _, metadata, clip, _ in samples(out)}
    assert set(found) == set(expected)
    for name, (latent, text) in expected.items():
        metadata, clip = found[name]
        assert torch.equal(clip.latent, latent.float())
        assert torch.equal(torch.as_tensor(clip.parts["text.safetensors"]["text"]), text)
        assert (metadata["height"], metadata["width"]) == (32, 48)
    assert found["000000"][0]["aesthetic_score"] == 5.5
    assert (found["000001"][0]["fps"], found["000001"][0]["num_frames"]) == (24, 3)
    description = check_folder(out, "train").description
    assert (description["text_encoder"], description["vae"]) == ("t5-11b", "cosmos")
    assert description["skipped"] == {"pickled": 1, "missing_part": 1}
    data = EnergonData(path=str(out), min_aesthetic_score=5)
    stream = data.build_train(spec(num_classes=None, micro_batch_size=1), dp_rank=0, dp_size=1, seed=0, log_dir=None)
    batch = next(stream)
    assert batch.conditions["context"].layout.lengths == (5,)
    stream.close()


def test_archives_of_pictures_with_encoded_texts(tmp_path: Path) -> None:
    """The two formats of NeMo's Imagen, by a list of archives; the picture stays the file it was."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG")
    text = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
    other = np.ones((2, 5), np.float32)
    parts = {
        "a.jpg": buffer.getvalue(),
        "a.txt": b"a cat",
        "a.pickle": pickle.dumps({"embeddings_t5_xxl": {"encodings": text}, "clip": {"encodings": other}}),
        "b.jpg": buffer.getvalue(),
        "b.pickle": pickle.dumps({"embeddings_t5_xxl": text}),
    }
    write_tar(tmp_path / "1.tar", {k: v for k, v in parts.items() if k[0] == "a"})
    write_tar(tmp_path / "2.tar", {k: v for k, v in parts.items() if k[0] == "b"})
    (tmp_path / "list.pkl").write_bytes(
        pickle.dumps({"tar_files": ["1.tar", str(tmp_path / "2.tar")], "chunk_size": 1, "total_key_count": 2})
    )
    words = ["tensors", "--in", str(tmp_path / "list.pkl"), "--validation", "0", "--processes", "1", "--out"]
    assert main([*words, str(tmp_path / "out"), "--text-key", "embeddings_t5_xxl"]) == 0
    found = list(samples(tmp_path / "out"))
    assert [metadata.get("caption") for _, metadata, _, _ in found] == ["a cat", None]
    for _, _, clip, _ in found:
        assert torch.equal(clip.latent, pixel_values(pixels_of([open_picture(buffer.getvalue())])))
        assert np.array_equal(clip.parts["text.safetensors"]["text"].numpy(), text)


def test_archives_of_one_name_and_samples_of_one_name(tmp_path: Path) -> None:
    """Those of two folders are different samples; the second of one archive is counted."""
    latent = torch_file(torch.zeros(4, 1, 2, 2))
    for folder in ("a", "b"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        write_tar(tmp_path / "in" / folder / "0.tar", {"1.pth": latent, "2.pth": latent})
    with tarfile.open(tmp_path / "in" / "a" / "0.tar", "a") as tar:
        member = tarfile.TarInfo("1.pth")
        member.size = len(latent)
        tar.addfile(member, io.BytesIO(latent))
    out = tmp_path / "out"
    words = ["--in", str(tmp_path / "in"), "--out", str(out), "--validation", "0", "--processes", "1"]
    assert main(["tensors", *words]) == 0
    found = json.loads((out / "dataset.json").read_text())
    assert found["samples"] == {"train": 4}
    assert found["skipped"] == {"duplicate": 1}


def test_archives_below_a_linked_folder_are_read_with_follow_links_and_named_without(tmp_path: Path) -> None:
    latent = torch_file(torch.zeros(4, 1, 2, 2))
    for folder in ("in", "elsewhere"):
        (tmp_path / folder).mkdir()
        write_tar(tmp_path / folder / "0.tar", {"1.pth": latent})
    (tmp_path / "in" / "more").symlink_to(tmp_path / "elsewhere")
    words = ["tensors", "--in", str(tmp_path / "in"), "--validation", "0", "--processes", "1", "--out"]
    for out, flags, count, skipped in (
        ("without", [], 1, {"linked_folder": 1}),
        ("with", ["--follow-links"], 2, {}),
    ):
        assert main([*words, str(tmp_path / out), *flags]) == 0
        found = json.loads((tmp_path / out / "dataset.json").read_text())
        assert (found["samples"], found["skipped"]) == ({"train": count}, skipped)


@pytest.mark.parametrize("command", ["tensors", "webdataset"])
def test_a_link_to_an_archive_outside_is_read_with_follow_links_only(
    tmp_path: Path, capsys: pytest.CaptureFixture, command: str
) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (16, 16)).save(picture, "PNG")
    for folder in ("in", "elsewhere"):
        (tmp_path / folder).mkdir()
        write_tar(tmp_path / folder / f"{folder}.tar", {"1.png": picture.getvalue()})
    (tmp_path / "in" / "inside.tar").symlink_to("in.tar")
    (tmp_path / "in" / "outside.tar").symlink_to("../elsewhere/elsewhere.tar")
    words = [command, "--in", str(tmp_path / "in"), "--validation", "0", "--processes", "1"]
    words += [*(["--size", "16"] if command == "webdataset" else []), "--out"]
    for out, flags, count, skipped in (
        ("without", [], 2, {"path_escape": 1}),
        ("with", ["--follow-links"], 3, {}),
    ):
        assert main([*words, str(tmp_path / out), *flags]) == 0
        found = json.loads((tmp_path / out / "dataset.json").read_text())
        assert (found["samples"], found["skipped"]) == ({"train": count}, skipped)
    (tmp_path / "in" / "in.tar").unlink()
    (tmp_path / "in" / "inside.tar").unlink()
    assert main([*words, str(tmp_path / "none")]) == EXIT_DATA
    assert "1 path_escape (outside.tar: a link to a file outside of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["{outside}/0.tar", "../outside/0.tar", "link.tar"])
def test_a_list_of_archives_outside_its_folder_is_read_with_follow_links_only(tmp_path: Path, name: str) -> None:
    for folder in ("in", "outside"):
        (tmp_path / folder).mkdir()
    archive = write_tar(tmp_path / "outside" / "0.tar", {"1.pth": torch_file(torch.zeros(4, 1, 2, 2))})
    (tmp_path / "in" / "link.tar").symlink_to(archive)
    listed = tmp_path / "in" / "list.pkl"
    listed.write_bytes(pickle.dumps({"tar_files": [name.format(outside=tmp_path / "outside")]}))
    with pytest.raises(DataError, match="outside of its folder, and 0 other files; --follow-links reads it"):
        list_archives(listed)
    archives, _ = list_archives(listed, follow_links=True)
    assert [path.resolve() for path in archives] == [archive]


def test_a_list_that_names_an_archive_twice_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {"1.pth": torch_file(torch.zeros(4, 1, 2, 2))})
    (tmp_path / "list.pkl").write_bytes(pickle.dumps({"tar_files": ["0.tar", str(tmp_path / "0.tar")]}))
    with pytest.raises(DataError, match=r"0\.tar twice"):
        list_archives(tmp_path / "list.pkl")


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (pickle.dumps({"tar_files": []}), EXIT_DATA, "has no list 'tar_files'"),
        (pickle.dumps({"tar_files": ["none.tar"]}), EXIT_DATA, "none.tar, which does not exist"),
        (pickle.dumps(Runs(Path("/tmp/never"))), EXIT_DATA, "nothing was run"),
    ],
)
def test_a_list_of_archives_is_read_safely(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes, code: int, says: str
) -> None:
    (tmp_path / "list.pkl").write_bytes(content)
    assert main(["tensors", "--in", str(tmp_path / "list.pkl"), "--out", str(tmp_path / "out")]) == code
    assert says in capsys.readouterr().err
    assert main(["tensors", "--in", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")]) == EXIT_CONFIG
