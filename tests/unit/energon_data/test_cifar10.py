"""CIFAR-10's own files become a data set: both versions give the same pictures, labels, names and splits."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from preparations import samples

from dit.batch import pixel_values
from dit.errors import EXIT_DATA
from energon_data.folder import check_folder
from energon_data.prepare.__main__ import main

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
COUNT = 3


def pixels_and_labels(name: str) -> tuple[np.ndarray, list[int]]:
    generator = np.random.default_rng(BATCHES.index(name))
    return generator.integers(0, 256, (COUNT, 3072), np.uint8), generator.integers(0, 10, COUNT).tolist()


def python2_pickle(entries: dict) -> bytes:
    """Write a dictionary of texts, numbers, lists and uint8 matrices as Python 2 does: texts are bytes, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def write(value: object) -> bytes:
        if isinstance(value, str):
            return text(value.encode("latin1"))
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, list):
            return b"](" + b"".join(map(write, value)) + b"e"
        assert isinstance(value, np.ndarray)
        empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        minus_one = b"J\xff\xff\xff\xff"
        kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
        kind += b"(K\x03" + text(b"|") + b"NNN" + minus_one + minus_one + b"K\x00tb"
        shape = b"".join(map(write, value.shape)) + b"\x86"
        return empty + b"(K\x01" + shape + kind + b"\x89" + text(value.tobytes()) + b"tb"

    return b"\x80\x02}(" + b"".join(write(name) + write(value) for name, value in entries.items()) + b"u."


def write_python(folder: Path) -> None:
    for name in BATCHES:
        pixels, labels = pixels_and_labels(name)
        files = [f"{name}_{i}.png" for i in range(COUNT)]
        entries = {"data": pixels, "labels": labels, "batch_label": f"batch {name}", "filenames": files}
        (folder / name).write_bytes(python2_pickle(entries))
    meta = {"num_cases_per_batch": COUNT, "label_names": NAMES, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(python2_pickle(meta))


def write_python_with_bytes(folder: Path) -> None:
    """As Python 3 writes again what it read with `encoding="bytes"`: keys and names are bytes; labels as an array."""
    write_python(folder)
    for path in folder.iterdir():
        entries = pickle.loads(path.read_bytes(), encoding="bytes")
        if b"labels" in entries:
            entries[b"labels"] = np.array(entries[b"labels"])
        path.write_bytes(pickle.dumps(entries))


def write_binary(folder: Path) -> None:
    for name in BATCHES:
        pixels, labels = pixels_and_labels(name)
        records = [bytes([label]) + row.tobytes() for label, row in zip(labels, pixels)]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")


def test_the_written_pickles_are_what_python_reads(tmp_path: Path) -> None:
    """Python's own reader, as the page of the data set calls it."""
    write_python(tmp_path)
    found = pickle.loads((tmp_path / "data_batch_2").read_bytes(), encoding="bytes")
    pixels, labels = pixels_and_labels("data_batch_2")
    assert np.array_equal(found[b"data"], pixels)
    assert found[b"labels"] == labels


@pytest.mark.parametrize(
    ("write", "folder"),
    [
        (write_python, "cifar-10-batches-py"),
        (write_binary, "cifar-10-batches-bin"),
        (write_python, ""),
        (write_python_with_bytes, "cifar-10-batches-py"),
    ],
)
def test_both_versions_give_every_picture_with_its_class(tmp_path: Path, write, folder: str) -> None:
    """The folder itself or the one that it was unpacked in; the test batch alone is held out."""
    source, out = tmp_path / "source", tmp_path / "out"
    (source / folder).mkdir(parents=True)
    write(source / folder)
    assert main(["cifar10", "--in", str(source), "--out", str(out)]) == 0
    assert {split: check_folder(out, split).samples for split in ("train", "val")} == {"train": 5 * COUNT, "val": COUNT}
    assert check_folder(out, "train").description["class_names"] == NAMES
    found = [(split, metadata["label"], metadata["class"], clip) for split, metadata, clip, _ in samples(out)]
    wanted = [(name, i) for name in BATCHES for i in range(COUNT)]
    assert len(found) == len(wanted)
    for (split, label, word, clip), (name, i) in zip(found, wanted):
        pixels, labels = pixels_and_labels(name)
        assert split == ("val" if name == "test_batch" else "train")
        assert (label, word) == (labels[i], NAMES[labels[i]])
        assert torch.equal(clip.latent[:, 0], pixel_values(torch.from_numpy(pixels[i].reshape(3, 32, 32))))


@pytest.mark.parametrize("name", ["cifar-10-batches-py", "cifar-10-batches-py/data_batch_2"])
def test_a_link_out_of_the_folder_is_read_with_follow_links_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "in" / "cifar-10-batches-py").mkdir(parents=True)
    write_python(tmp_path / "in" / "cifar-10-batches-py")
    link = tmp_path / "in" / name
    link.rename(tmp_path / "outside")
    link.symlink_to(tmp_path / "outside")
    words = ["cifar10", "--in", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main(words) == EXIT_DATA
    assert f"{link} is outside of {tmp_path / 'in'}; --follow-links reads it" in capsys.readouterr().err
    assert main([*words, "--follow-links"]) == 0


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("data_batch_3", None, "data_batch_3 cannot be read"),
        ("data_batch_3", python2_pickle({"data": np.zeros((2, 8), np.uint8), "labels": [0, 1]}), "no `data` of bytes"),
        (
            "test_batch",
            python2_pickle({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}),
            "2 pictures and 2 labels",
        ),
        ("test_batch", b"cos\nsystem\n(S'true'\ntR.", "it calls os.system, which tensors do not need; nothing was run"),
        ("batches.meta", python2_pickle({"label_names": ["a"]}), "expected 10"),
    ],
)
def test_a_folder_without_cifar10_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, says: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    write_python(source)
    if content is None:
        (source / name).unlink()
    else:
        (source / name).write_bytes(content)
    assert main(["cifar10", "--in", str(source), "--out", str(out)]) == EXIT_DATA
    assert says in capsys.readouterr().err
    assert not out.exists()
