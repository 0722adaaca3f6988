"""Counts of batches on the way from the loader to the device."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from dit.batch import PackedBatch, RawSamples
from dit.condition_table import LABEL
from dit.data_api import BatchSpec
from dit.fixed_packs import PackMaxima
from dit.step.device_batches import DeviceBatches
from energon_data.mock import MockData

SPEC = BatchSpec(
    patch_temporal=1,
    patch_spatial=2,
    latent_channels=4,
    conditions=(replace(LABEL, num_classes=10),),
    micro_batch_size=4,
)


def test_waiting_for_the_loader_is_counted_and_other_work_is_not() -> None:
    stream: Any = MockData().build_train(SPEC, dp_rank=0, dp_size=1, seed=0, log_dir=None)

    class Slow:
        def __next__(self) -> PackedBatch:
            time.sleep(0.02)
            return next(stream)

    def encode(batch: PackedBatch) -> PackedBatch:
        time.sleep(1.0)
        return batch

    slow: Any = Slow()
    batches = DeviceBatches(slow, torch.device("cpu"), SPEC, lambda batch: 7, encode=encode)
    for _ in range(3):
        next(batches)
    counted = batches.reset()
    assert 0.06 <= counted.waited_s < 1.0
    assert (counted.samples, counted.flops) == (12, [7, 7, 7])
    assert batches.reset().waited_s == 0


@pytest.mark.parametrize("frames", [[1], [2], [1, 2], [2, 1]])
def test_a_patch_of_equal_frames_is_a_still_and_smaller_than_a_clip(frames: list[int]) -> None:
    spec = replace(SPEC, patch_temporal=2)
    streams: list[Any] = [
        MockData(frames=count).build_train(spec, dp_rank=0, dp_size=1, seed=0, log_dir=None) for count in frames
    ]
    packs: Any = (next(stream) for stream in streams)
    batches = DeviceBatches(packs, torch.device("cpu"), spec, lambda batch: 7)
    for _ in frames:
        next(batches)
    assert batches.latent_size() == (max(frames), 16, 16)
    batches.restore_largest({"latent_size": [1, 8, 8]})
    assert batches.largest is not None
    assert (batches.largest.tokens, batches.latent_size()) == (16, (1, 8, 8))


@pytest.mark.parametrize("frames", [1, 3])
def test_the_largest_sample_is_found_without_a_read_of_encoded_latents(frames: int) -> None:
    """A GPU would finish all its work before it answers whether the frames of a patch are equal."""
    spec = replace(SPEC, patch_temporal=2)
    stream: Any = MockData(frames=2).build_train(spec, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    pack = next(stream)
    pixels = tuple(torch.zeros(3, frames, 16, 16, dtype=torch.uint8) for _ in pack.grids)
    packs: Any = iter([replace(pack, raw=RawSamples(pixels))])

    def encode(batch: PackedBatch) -> PackedBatch:
        return replace(batch, latents_TC=batch.latents_TC.to("meta"), raw=None)

    batches = DeviceBatches(packs, torch.device("cpu"), spec, lambda batch: 7, encode=encode)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(PackedBatch, "to", lambda batch, _: batch)
        next(batches)
    assert batches.latent_size()[0] == (1 if frames == 1 else 2)


def test_a_batch_read_before_the_clock_started_is_not_counted_as_waiting() -> None:
    """This is the first batch: a loader takes seconds to start, which must not count as waiting of steps."""
    stream: Any = MockData().build_train(SPEC, dp_rank=0, dp_size=1, seed=0, log_dir=None)

    class Slow:
        def __next__(self) -> PackedBatch:
            time.sleep(0.2)
            return next(stream)

    slow: Any = Slow()
    batches = DeviceBatches(slow, torch.device("cpu"), SPEC, lambda batch: 7)
    batches.peek()
    next(batches)
    assert batches.reset().waited_s < 0.1
    next(batches)
    assert batches.reset().waited_s >= 0.2


def test_padding_to_fixed_sizes_counts_as_tokens_and_not_as_samples() -> None:
    stream: Any = MockData().build_train(SPEC, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    maxima = PackMaxima(tokens=300, samples=6)
    batches = DeviceBatches(stream, torch.device("cpu"), SPEC, lambda batch: len(batch.keys), maxima=maxima)
    layout = next(batches).layout
    assert (layout.lengths, layout.total_tokens) == ((64, 64, 64, 64, 0, 0), 300)
    counted = batches.reset()
    assert (counted.samples, counted.valid_tokens, counted.padded_tokens) == (4, 256, 300)
    assert (counted.flops, len(counted.keys)) == ([4], 4)
