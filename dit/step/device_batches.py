"""From the loader to the device: check every micro-batch, move it, and count its samples, tokens and FLOPs."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Optional

import torch

from dit.batch import PackedBatch
from dit.condition_table import DEFAULT_FPS, FPS
from dit.data_api import BatchSpec, DataStream
from dit.monitoring.heartbeat import Phase
from dit.patchify import Grid


@dataclass
class Consumed:
    """Counters of one rank since the last reset.

    Attributes:
        valid_tokens, padded_tokens: real tokens, and all with padding.
        flops: of each micro-batch.
        waited_s: seconds from asking for micro-batches until they were in this process, except for `peek`.
    """

    samples: int = 0
    valid_tokens: int = 0
    padded_tokens: int = 0
    flops: list[int] = field(default_factory=list)
    waited_s: float = 0.0
    keys: list[str] = field(default_factory=list)


class DeviceBatches(Iterator[PackedBatch]):
    """Micro-batches on the device, checked against the model and sharded for this rank.

    Counts are those of full packs: sum them over the data-parallel group only.

    Args:
        stream: the source.
        device: the target.
        spec: the properties that the model requires.
        flops: returns the executed training FLOPs of a micro-batch.
        shard: selects the local tokens of a full pack (context parallel).
        encode: turns pixels and captions into latents and texts (`dit.encoders.online`).
        phase: learns when this rank waits for data.

    Attributes:
        device: the target.
        largest_grid: (t, h, w) patches of the sample with most tokens so far.
        fps: frames per second of that sample.
        of_step: this rank's micro-batches since `begin_step`, before they moved to the device.
    """

    def __init__(
        self,
        stream: DataStream,
        device: torch.device,
        spec: BatchSpec,
        flops: Callable[[PackedBatch], int],
        shard: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
        encode: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
        phase: Optional[Phase] = None,
    ) -> None:
        self._phase = phase or Phase()
        self._peeked: Optional[PackedBatch] = None
        self._shard, self._encode = shard, encode
        self._stream, self.device, self._spec, self._flops = stream, device, spec, flops
        self.consumed = Consumed()
        self.largest_grid: Optional[Grid] = None
        self.fps = DEFAULT_FPS
        self.of_step: list[PackedBatch] = []

    def begin_step(self) -> None:
        """Forget the micro-batches of the step before."""
        self.of_step.clear()

    def again(self) -> Iterator[PackedBatch]:
        """Return the micro-batches of the step once more, on the device."""
        self._phase.enter("computes")
        return (batch.to(self.device) for batch in self.of_step)

    def peek(self) -> PackedBatch:
        """Return the next full pack as the source made it; it stays the next one."""
        if self._peeked is None:
            self._phase.enter("reads data")
            self._peeked = next(self._stream)
            self._phase.enter("computes")
        return self._peeked

    def __next__(self) -> PackedBatch:
        began = time.perf_counter()
        read, self._peeked = self.peek(), None
        self.consumed.waited_s += time.perf_counter() - began
        batch = self._encode(read)
        batch.validate(self._spec.conditions, patch_volume=self._spec.patch_volume)
        self.consumed.samples += batch.layout.num_samples
        self.consumed.valid_tokens += batch.layout.valid_tokens
        self.consumed.padded_tokens += batch.layout.total_tokens
        self.consumed.flops.append(self._flops(batch))
        self.consumed.keys.extend(batch.keys)
        named = batch.conditions.get(FPS.name)
        rates = [DEFAULT_FPS] * len(batch.grids) if named is None else named.values.tolist()
        for grid, fps in zip(batch.grids, rates):
            if self.largest_grid is None or prod(grid) > prod(self.largest_grid):
                self.largest_grid, self.fps = grid, fps
        local = self._shard(batch)
        self.of_step.append(local)
        return local.to(self.device, non_blocking=True)

    def latent_size(self, spec: BatchSpec) -> tuple[int, int, int]:
        """Return (T, H, W) of the largest latent so far."""
        assert self.largest_grid is not None
        t, h, w = self.largest_grid
        return t * spec.patch_temporal, h * spec.patch_spatial, w * spec.patch_spatial

    def recall_largest(self, metadata: Mapping[str, Any], spec: BatchSpec) -> None:
        """Restore the largest sample so far from a checkpoint's metadata: `latent_size` (T, H, W) and `fps`."""
        t, h, w = metadata["latent_size"]
        self.largest_grid = t // spec.patch_temporal, h // spec.patch_spatial, w // spec.patch_spatial
        self.fps = metadata.get("fps", DEFAULT_FPS)

    def reset(self) -> Consumed:
        """Return the counters and start new ones."""
        counted, self.consumed = self.consumed, Consumed()
        return counted
