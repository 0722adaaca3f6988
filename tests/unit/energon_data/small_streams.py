"""Streams of small data sets, and how tests read and compare them."""

import io
from collections.abc import Iterator
from typing import Any

import torch
from small_data import spec

from dit.batch import PackedBatch
from dit.data_api import BatchSpec, DataConfig
from energon_data.dataset import EnergonData
from energon_data.streams import StreamGroup

PACKED: dict[str, Any] = {
    "max_tokens_per_pack": 40,
    "pack_multiple_of": 8,
    "packing_buffer_size": 24,
    "pad_packs": True,
}


def build_spec(data: DataConfig, mbs: int, multiple_of: int) -> BatchSpec:
    channels = 3 if isinstance(data, EnergonData) and data.crop_size else 2
    return spec(micro_batch_size=mbs, latent_channels=channels, multiple_of=multiple_of)


def build(data: DataConfig, rank: int = 0, dp: int = 1, mbs: int = 4, multiple_of: int = 1) -> StreamGroup:
    stream = data.build_train(build_spec(data, mbs, multiple_of), dp_rank=rank, dp_size=dp, seed=5, log_dir=None)
    assert isinstance(stream, StreamGroup)
    return stream


def take(stream: Iterator[PackedBatch], count: int) -> list[PackedBatch]:
    return [next(stream) for _ in range(count)]


def same(some: list[PackedBatch], others: list[PackedBatch]) -> None:
    assert [x.keys for x in some] == [y.keys for y in others]
    for x, y in zip(some, others):
        for name in ("latents_TC", "positions_T3", "sample_ids_S", "draws_S"):
            a, b = getattr(x, name), getattr(y, name)
            assert a is b is None or torch.equal(a, b), name
        assert set(x.conditions) == set(y.conditions)
        for name in x.conditions:
            assert torch.equal(x.conditions[name].values, y.conditions[name].values), name
        assert x.layout.lengths == y.layout.lengths
        assert x.conditions["context"].layout.lengths == y.conditions["context"].layout.lengths


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
