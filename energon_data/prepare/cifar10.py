"""CIFAR-10 from local files of the Python or the binary version.

    cifar-10-batches-py/                        cifar-10-batches-bin/
      data_batch_1 ... data_batch_5               data_batch_1.bin ... data_batch_5.bin      training
      test_batch                                  test_batch.bin                             held out
      batches.meta                                batches.meta.txt                           names of the classes

A batch for Python is a pickle of a dictionary with `data` (uint8 `[N, 3072]`) and `labels`; a binary batch consists of
records of a label and 3,072 bytes. A picture is stored as its red, green and blue plane, row by row. Keys and names are
texts, or bytes if Python 3 has read the original pickles as bytes and written them again.

Source: Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images; www.cs.toronto.edu/~kriz/cifar.html.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dit.errors import DataError
from dit.safe_files import read_bytes
from energon_data.media_files import picture_bytes
from energon_data.prepare.safe_pickle import read_pickle
from energon_data.prepare.shards import ShardWriter, published_folder, write_dataset_file, write_energon_metadata
from energon_data.prepare.sources import check_inside, paths_below
from energon_data.samples import SampleError

SIDE, CHANNELS, NUM_CLASSES = 32, 3, 10
PICTURE_BYTES = CHANNELS * SIDE * SIDE
BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "val": ("test_batch",)}


@dataclass(frozen=True)
class Batch:
    """The pictures of one file, uint8 `[N, 3, 32, 32]`, and their classes."""

    pixels: np.ndarray
    labels: Sequence[int]


def read_batch(folder: Path, name: str) -> Batch:
    """Read one batch of either version."""
    binary = folder / f"{name}.bin"
    path = binary if binary.is_file() else folder / name
    try:
        data = read_bytes(path)
        pixels, labels = _records(data) if path is binary else _pickled(data)
    except (OSError, SampleError) as error:
        detail = error.detail if isinstance(error, SampleError) else error
        raise DataError(f"{path} cannot be read as a batch of CIFAR-10: {detail}") from error
    if len(labels) != len(pixels) or not all(label in range(NUM_CLASSES) for label in labels):
        raise DataError(
            f"{path} has {len(pixels)} pictures and {len(labels)} labels; each picture needs a label from 0 to 9"
        )
    return Batch(pixels.reshape(-1, CHANNELS, SIDE, SIDE), labels)


def _records(data: bytes) -> tuple[np.ndarray, list[int]]:
    if not data or len(data) % (1 + PICTURE_BYTES):
        raise SampleError("wrong_shape", f"{len(data)} bytes are not records of {1 + PICTURE_BYTES}")
    records = np.frombuffer(data, np.uint8).reshape(-1, 1 + PICTURE_BYTES)
    return records[:, 1:], records[:, 0].tolist()


def _pickled(data: bytes) -> tuple[np.ndarray, list[int]]:
    entries = _entries(data)
    pixels, labels = entries.get("data"), entries.get("labels")
    labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PICTURE_BYTES,):
        raise SampleError("wrong_part", f"it has no `data` of bytes [N, {PICTURE_BYTES}]")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise SampleError("wrong_part", "it has no `labels`, a list of numbers")
    return pixels, labels


def _entries(data: bytes) -> Mapping[str, Any]:
    """Return the entries of a pickled dictionary with names as text; empty for other objects."""
    content = read_pickle(data)
    return {_text(name): value for name, value in content.items()} if isinstance(content, dict) else {}


def _text(value: Any) -> Any:
    return value.decode("latin1") if isinstance(value, bytes) else value


def read_class_names(folder: Path) -> list[str]:
    """Return the names of the classes in their order."""
    plain, pickled = folder / "batches.meta.txt", folder / "batches.meta"
    try:
        if plain.is_file():
            names: Any = read_bytes(plain).decode().split()
        else:
            names = _entries(read_bytes(pickled)).get("label_names")
            names = [_text(name) for name in names] if isinstance(names, list) else names
    except (OSError, UnicodeDecodeError, SampleError) as error:
        detail = error.detail if isinstance(error, SampleError) else error
        raise DataError(
            f"{folder} has no class names: {detail}; it must have the unpacked files of CIFAR-10"
        ) from error
    if not isinstance(names, list) or len(names) != NUM_CLASSES or not all(isinstance(name, str) for name in names):
        raise DataError(f"{folder} has the class names {names!r:.80}, expected {NUM_CLASSES}")
    return names


def prepare_cifar10(
    source: Path, out: Path, *, samples_per_shard: int = 2000, force: bool = False, follow_links: bool = False
) -> dict[str, int]:
    """Write CIFAR-10 as Energon shards of PNG pictures with labels; `out` appears only when complete.

    Args:
        source: the folder of the unpacked files, or its parent folder.
    """
    if not follow_links:
        check_inside(paths_below(source), source)
    inside = [source / name for name in ("cifar-10-batches-py", "cifar-10-batches-bin") if (source / name).is_dir()]
    source = inside[0] if inside else source
    class_names = read_class_names(source)
    shards: dict[str, dict[str, Any]] = {}
    counts: dict[str, int] = {}
    with published_folder(out.absolute(), force=force) as folder:
        for split, names in BATCHES.items():
            writer = ShardWriter(folder, split, samples_per_shard)
            for name in names:
                batch = read_batch(source, name)
                counts[split] = counts.get(split, 0) + len(batch.pixels)
                for number, (pixels, label) in enumerate(zip(batch.pixels, batch.labels)):
                    picture = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
                    metadata = {"label": label, "class": class_names[label], "height": SIDE, "width": SIDE}
                    writer.add(f"{name}_{number:05d}", metadata, {"pixels.png": picture_bytes(picture, "png")})
            writer.close()
            shards |= writer.shards
        write_dataset_file(
            folder,
            {
                "format": 1,
                "name": "cifar10",
                "class_names": class_names,
                "latent_shape": [CHANNELS, 1, SIDE, SIDE],
                "samples": counts,
                "shards": shards,
            },
        )
        write_energon_metadata(folder, shards, list(BATCHES))
    return counts
