"""Small data sets with known content."""

import io
import tarfile
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dit.batch import PackedBatch
from dit.condition_table import CONTEXT, FPS, LABEL, POOLED
from dit.data_api import BatchSpec
from energon_data.dataset import EnergonData
from energon_data.media_files import picture_bytes
from energon_data.prepare.shards import ShardWriter, write_dataset_file, write_energon_metadata

Samples = Iterable[tuple[str, dict[str, Any], dict[str, bytes]]]


def npy(array: np.ndarray) -> bytes:
    """Return the bytes of an `.npy` part."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def clips(
    count: int, *, sizes: list[tuple[int, int, int]], channels: int = 2, context: int = 3, seed: int = 0
) -> Samples:
    """Yield latents of the given sizes in turn, with texts of 1..8 tokens; all values of sample `i` are `i`."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        latent = np.full((channels, *sizes[i % len(sizes)]), i, np.float32)
        text = rng.standard_normal((1 + i % 8, context), np.float32)
        meta = {"label": i % 10, "fps": 12.0, "aesthetic_score": i / count}
        yield f"clip{i:05d}", meta, {"latent.npy": npy(latent), "text.npy": npy(text)}


def pictures(count: int, *, sizes: list[tuple[int, int]], context: int = 3, seed: int = 0) -> Samples:
    """Yield pictures of random pixels of the given sizes (height, width) in turn, with texts of 1..4 tokens."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        picture = Image.fromarray(rng.integers(0, 256, (*sizes[i % len(sizes)], 3), np.uint8))
        text = rng.standard_normal((1 + i % 4, context), np.float32)
        parts = {"pixels.png": picture_bytes(picture, "png"), "text.npy": npy(text)}
        yield f"picture{i:05d}", {"label": i % 10, "caption": "x" * (i % 7)}, parts


def write_dataset(folder: Path, splits: dict[str, Samples], *, per_shard: int = 16) -> Path:
    """Write shards and metadata of the given splits."""
    folder.mkdir(parents=True)
    shards: dict[str, dict[str, int]] = {}
    for split, samples in splits.items():
        writer = ShardWriter(folder, split, per_shard)
        for key, metadata, parts in samples:
            writer.add(f"{split}_{key}", metadata, parts)
        writer.close()
        shards |= writer.shards
    write_dataset_file(folder, {"format": 1, "shards": shards})
    write_energon_metadata(folder, shards, splits)
    return folder


def damage(folder: Path, key: str, part: str = "latent.npy", *, position: int = -1) -> Path:
    """Flip a bit of one member in place, and return its shard; offsets, sizes and headers do not change."""
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            members = {member.name: member for member in tar}
        if member := members.get(f"{key}.{part}"):
            data = bytearray(shard.read_bytes())
            data[member.offset_data + position % member.size] ^= 1
            shard.write_bytes(data)
            return shard
    raise AssertionError(key)


def spec(
    *, num_classes: int | None = 10, context_size: int | None = 3, pooled_size: int | None = None, **changes: Any
) -> BatchSpec:
    """Return the spec that fits `clips`."""
    wanted = [FPS]
    if num_classes is not None:
        wanted.append(replace(LABEL, num_classes=num_classes))
    if context_size is not None:
        wanted.append(replace(CONTEXT, shape=(context_size,)))
    if pooled_size is not None:
        wanted.append(replace(POOLED, shape=(pooled_size,)))
    usual = {"patch_temporal": 1, "patch_spatial": 2, "latent_channels": 2, "micro_batch_size": 4}
    return BatchSpec(**{"conditions": tuple(wanted), **usual, **changes})


def read_batches(
    data: EnergonData, wanted: BatchSpec, count: int, *, seed: int = 0, log_dir: Path | None = None
) -> tuple[list[PackedBatch], dict[str, int]]:
    """Return the first micro-batches of a training on one rank, and the samples skipped before their last."""
    directory = None if log_dir is None else str(log_dir)
    with closing(data.build_train(wanted, dp_rank=0, dp_size=1, seed=seed, log_dir=directory)) as stream:
        return [next(stream) for _ in range(count)], stream.sample_counts().by_reason()


def first_batch(data: EnergonData, wanted: BatchSpec) -> PackedBatch:
    """Return the first micro-batch of a training on one rank, without shuffling and workers."""
    [batch], _ = read_batches(replace(data, shuffle_buffer=0, background=False), wanted, 1)
    return batch


def run(
    folder: Path, batches: int = 40, *, log_dir: Path | None = None, **settings: Any
) -> tuple[list[str], dict[str, int]]:
    """Read about two epochs and return the keys seen and the samples skipped."""
    data = EnergonData(**({"path": str(folder), "shuffle_buffer": 0} | settings))
    read, skipped = read_batches(data, spec(), batches, log_dir=log_dir)
    return [key for batch in read for key in batch.keys], skipped
