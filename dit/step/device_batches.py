"""Micro-batches on the device: checked against the model, copied, counted in samples, tokens and FLOPs."""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Optional

import torch

from dit import layout
from dit.backends.process_groups import gather_objects
from dit.batch import PackedBatch
from dit.condition_table import DEFAULT_FPS, FPS
from dit.data_api import BatchSpec
from dit.fixed_packs import PackMaxima
from dit.layout import SequenceLayout
from dit.monitoring.heartbeat import Phase
from dit.pack_copy import compute_tables, layouts_of
from dit.patchify import Grid, frames_to_patch, num_frames
from dit.step.balance import Packs

RARE = 16
"""A preview leaves out samples so large that fewer than one of this many is as large."""


@dataclass
class Consumed:
    """Counters of one rank since the last reset.

    Attributes:
        flops: FLOPs of each micro-batch.
        waited_s: seconds until requested micro-batches arrived in this process, without those of `peek`.
    """

    samples: int = 0
    valid_tokens: int = 0
    padded_tokens: int = 0
    flops: list[int] = field(default_factory=list)
    waited_s: float = 0.0
    keys: list[str] = field(default_factory=list)


class Largest(NamedTuple):
    """A sample; its fields are compared in this order, so the largest of some samples does not depend on their order.

    Attributes:
        grid: (t, h, w) patches.
        frames: of the latent; 1 for a still, which is repeated to fill a patch.
    """

    tokens: int
    grid: Grid
    fps: float
    frames: int


class PackCopy:
    """Copies the packs of a run to a device, one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._previous: dict[Hashable, SequenceLayout] = {}

    def __call__(self, batch: PackedBatch) -> PackedBatch:
        """Return a pack on the device; the host does not wait."""
        if self._device.type in layout.UNPINNED:
            return batch.to(self._device)
        compute_tables(layouts_of(batch), self._previous)
        moved = batch.to(self._device)
        self._previous = layouts_of(moved)
        return moved


class DeviceBatches(Iterator[PackedBatch]):
    """Micro-batches on the device, checked against the model and sharded for this rank.

    Counts cover full packs, so sum them over the data-parallel group only.

    Args:
        stream: source of full packs.
        flops: returns the training FLOPs of a micro-batch, 0 on a rank whose count is not reported.
        shard: selects the local tokens of a full pack (context parallel).
        encode: turns pixels and captions into latents and texts (`dit.encoders.online`).
        phase: phase of this rank, updated while it waits for data.
        maxima: pads packs to fixed sizes; None for no padding.

    Attributes:
        largest: the largest sample so far; None before the first one.
        sizes: number of samples in this process by tokens, grid and frame rate.
        step_batches: local micro-batches since `begin_step`, before their copy to the device.
    """

    def __init__(
        self,
        stream: Packs,
        device: torch.device,
        spec: BatchSpec,
        flops: Callable[[PackedBatch], int],
        shard: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
        encode: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
        phase: Optional[Phase] = None,
        maxima: Optional[PackMaxima] = None,
    ) -> None:
        self._phase, self._maxima = phase or Phase(), maxima
        self._peeked: Optional[PackedBatch] = None
        self._shard, self._encode, self._copy = shard, encode, PackCopy(device)
        self._stream, self.device, self._spec, self._flops = stream, device, spec, flops
        self.consumed = Consumed()
        self.largest: Optional[Largest] = None
        self.sizes = Counter[tuple[int, Grid, float]]()
        self.step_batches: list[PackedBatch] = []

    def begin_step(self) -> None:
        """Forget the micro-batches of the previous step."""
        self.step_batches.clear()

    def replay(self) -> Iterator[PackedBatch]:
        """Return the micro-batches of the current step again, on the device."""
        self._phase.enter("computes")
        return (batch.to(self.device) for batch in self.step_batches)

    def peek(self) -> PackedBatch:
        """Return the next full pack without consuming it, before its conditions are encoded."""
        if self._peeked is None:
            self._phase.enter("reads data")
            self._peeked = next(self._stream)
            self._phase.enter("computes")
        return self._peeked

    def __next__(self) -> PackedBatch:
        began = time.perf_counter()
        pack, self._peeked = self.peek(), None
        self.consumed.waited_s += time.perf_counter() - began
        batch = self._spec.check(self._encode(pack))
        batch = replace(batch, grids_S3=torch.tensor(batch.grids))
        self.consumed.samples += batch.layout.num_samples
        self.consumed.valid_tokens += batch.layout.valid_tokens
        padded = batch if self._maxima is None else self._maxima.pad(batch)
        self.consumed.padded_tokens += padded.layout.total_tokens
        self.consumed.flops.append(self._flops(batch))
        self.consumed.keys.extend(batch.keys)
        condition = batch.conditions.get(FPS.name)
        rates = [DEFAULT_FPS] * len(batch.grids) if condition is None else condition.values.tolist()
        sizes = [(prod(grid), grid, fps) for grid, fps in zip(batch.grids, rates)]
        self.sizes.update(sizes)
        largest = max(sizes)
        if self.largest is None or largest >= self.largest[:3]:
            members = [i for i, size in enumerate(sizes) if size == largest]
            sample = Largest(*largest, max(self._frames(pack, i) for i in members))
            self.largest = sample if self.largest is None else max(self.largest, sample)
        local = self._shard(padded)
        self.step_batches.append(local)
        return self._copy(local)

    def _frames(self, pack: PackedBatch, i: int) -> int:
        """Return the frames of the latent of a sample, 1 for a still; encoded latents on the device are not read."""
        grid, patch, start = pack.grids[i], self._spec.patch, pack.layout.starts[i]
        if pack.raw is not None and pack.raw.pixels is not None:
            return 1 if pack.raw.pixels[i].shape[1] == 1 else grid[0] * patch[0]
        return num_frames(pack.latents_TC[start : start + prod(grid)], grid, *patch)

    def latent_size(self) -> tuple[int, int, int]:
        """Return (T, H, W) of the largest latent so far."""
        assert self.largest is not None
        _, h, w = self.largest.grid
        return self.largest.frames, h * self._spec.patch_spatial, w * self._spec.patch_spatial

    def restore_largest(self, metadata: Mapping[str, Any]) -> None:
        """Restore the size of the largest sample from `latent_size` (T, H, W) and `fps` in a checkpoint's metadata."""
        frames, h, w = metadata["latent_size"]
        spec = self._spec
        t = frames_to_patch(frames, spec.patch_temporal) // spec.patch_temporal
        grid = t, h // spec.patch_spatial, w // spec.patch_spatial
        self.largest = Largest(prod(grid), grid, metadata.get("fps", DEFAULT_FPS), frames)

    def share_largest(self) -> tuple[tuple[int, int, int], float]:
        """Replace the largest sample by that of all ranks; every rank calls this.

        Returns:
            (T, H, W) of its latent, and its frames per second.
        """
        self.largest = max(gather_objects(self.largest))
        return self.latent_size(), self.largest.fps

    def share_typical(self) -> tuple[tuple[int, int, int], float]:
        """Return `share_largest` without samples so large that fewer than 1 of `RARE` has their size.

        A single long clip would otherwise determine the time and memory of every preview.
        """
        size, fps = self.share_largest()
        # All ranks of a replica have the same samples, which changes no share of them.
        counts = sum(gather_objects(self.sizes), Counter[tuple[int, Grid, float]]())
        larger = 0
        for typical in sorted(counts, reverse=True):
            larger += counts[typical]
            if larger * RARE >= counts.total():
                break
        else:  # a run that resumes after its last step reads no sample
            return size, fps
        if self.largest is None or typical == self.largest[:3]:
            return size, fps
        _, (t, h, w), fps = typical
        patch_temporal, side = self._spec.patch
        return (1 if t == 1 else t * patch_temporal, h * side, w * side), fps

    def reset(self) -> Consumed:
        """Return the counters and start new ones."""
        counted, self.consumed = self.consumed, Consumed()
        return counted
