"""Synthetic data with the same streams as real data: each sample is a function of the seed and its number."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.condition_table import FPS, LABEL
from dit.conditions import Condition, Value
from dit.data_api import BatchSpec, sample_id
from dit.errors import ConfigError, DataError
from dit.layout import CLEAN
from dit.levels import reference_positions, with_levels
from dit.patchify import frames_to_patch, grid_of, grid_positions
from dit.ranges import COUNT, PATCHES, ranged
from energon_data.packing import collate, padded_length
from energon_data.samples import Clip
from energon_data.streams import Position, Source, StreamItem, StreamSettings

_CACHED = 64
"""A data set of at most this many samples is cached, so that benchmarks do not time its generation."""
FRAMES_PER_SECOND = 24.0


@dataclass(kw_only=True)
class MockData(StreamSettings):
    """Random latents around one pattern per class.

    Packs are filled in order, and padded to `max_tokens_per_pack`.

    Attributes:
        frames, height, width: size of every latent.
        shapes: sizes used in turn instead, such as `["1x32x32", "8x16x16"]`.
        text_tokens: tokens of the longest text.
        dataset_size: distinct samples; None for no limit.
        validation_samples: held-out samples of one pass, divided over a blend by size; None for the full split.
    """

    frames: int = ranged(1, PATCHES)
    height: int = ranged(16, PATCHES)
    width: int = ranged(16, PATCHES)
    shapes: Optional[list[str]] = None
    text_tokens: int = ranged(16, COUNT)
    dataset_size: Optional[int] = ranged(None, COUNT)
    validation_samples: int = ranged(32, COUNT)

    def sizes(self) -> list[tuple[int, int, int]]:
        if self.shapes is None:
            return [(self.frames, self.height, self.width)]
        sizes = []
        for text in self.shapes:
            if (match := re.fullmatch(r"0*([1-9]\d{0,8})x0*([1-9]\d{0,8})x0*([1-9]\d{0,8})", text.lower())) is None:
                raise ConfigError(f"data.shapes must be texts like '8x16x16' (frames x height x width), got {text!r}")
            sizes.append((int(match[1]), int(match[2]), int(match[3])))
        if not sizes:
            raise ConfigError("data.shapes is empty; give at least one shape such as '1x16x16', or omit it")
        return sizes

    @property
    def longest_text(self) -> int:
        return self.text_tokens

    def mixes_shapes(self, spec: BatchSpec) -> bool:
        together = self.max_tokens_per_pack is not None or spec.micro_batch_size > 1
        return together and len(set(self.sizes())) > 1

    def check_settings(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        self.check_streams(micro_batches_per_step)
        for t, h, w in self.sizes():
            if t * h * w not in COUNT:
                raise ConfigError(
                    f"a mock latent of {t} x {h} x {w} (T x H x W) has {t * h * w:,} positions, which must be {COUNT}"
                )
            cut_in_time = frames_to_patch(t, spec.patch_temporal) % spec.patch_temporal == 0
            if not cut_in_time or h % spec.patch_spatial or w % spec.patch_spatial:
                raise ConfigError(
                    f"a mock latent of {t} x {h} x {w} (T x H x W) cannot be cut into patches of "
                    f"{spec.patch_temporal} x {spec.patch_spatial} x {spec.patch_spatial}; "
                    "change data.shapes, or model.patch_temporal and model.patch_spatial"
                )
        self.check_packs(spec)
        pack, longest = self.max_tokens_per_pack, max(self.selection_length(size, spec) for size in self.sizes())
        if pack is not None and longest > pack:
            raise ConfigError(
                f"data.max_tokens_per_pack={pack} is too short for the longest sample: {longest} tokens in multiples "
                f"of data.pack_multiple_of={self.pack_multiple_of}; use {longest}"
            )

    def validate(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        self.check_settings(spec, dp_size, micro_batches_per_step)

    def selection_length(self, size: tuple[int, int, int], spec: BatchSpec) -> int:
        """Return the tokens that a sample occupies in a pack; they do not depend on the layout."""
        return padded_length(math.prod(grid_of(*size, *spec.patch)), self.pack_multiple_of)

    @property
    def origin(self) -> str:
        return "mock data"

    def source_opener(self, spec: BatchSpec, seed: int, micro_batches_per_step: int) -> Callable[..., "MockSource"]:
        return partial(MockSource, self, spec, seed=seed, split="train")

    def build_validation(self, spec: BatchSpec, *, dp_rank: int, dp_size: int) -> Iterator[PackedBatch]:
        source = MockSource(
            self, spec, seed=0, split="val", stream=0, num_streams=1, last_sample=self.validation_samples
        )
        return self.share_validation(source.remaining(), dp_rank, dp_size)

    def empty_text(self, condition: Condition) -> Tensor:
        """Return zeros: one token of a text, or a pooled text."""
        return torch.zeros(*([1] if condition.axis == "text" else []), *(condition.shape or ()))

    def identity(self) -> dict[str, dict[str, str]]:
        """Return an empty dictionary, because the settings determine the samples."""
        return {}


class MockSource(Source):
    """One global stream of synthetic samples; sample `k` of stream `s` is number `k * num_streams + s`.

    Args:
        last_sample: number of samples after which the stream ends; None for an endless stream.
    """

    def __init__(
        self,
        data: MockData,
        spec: BatchSpec,
        *,
        seed: int,
        split: str,
        stream: int,
        num_streams: int,
        last_sample: Optional[int] = None,
    ) -> None:
        self._data, self._spec, self._seed, self._split = data, spec, seed, split
        self._stream, self._num_streams = stream, num_streams
        self._sizes = data.sizes()
        self._taken, self._last = 0, math.inf if last_sample is None else last_sample
        is_small = data.dataset_size is not None and data.dataset_size <= _CACHED
        self._sample = lru_cache(_CACHED)(self.sample) if is_small else self.sample
        self._pattern = lru_cache(None)(self._draw_pattern)

    def next(self) -> StreamItem:
        pack = self._data.max_tokens_per_pack
        clips: list[Clip] = []
        room = self._spec.micro_batch_size if pack is None else pack
        while self._taken < self._last and (need := self._needed()) <= room:
            room -= need
            clips.append(self._take())
        return StreamItem(collate(clips, self._spec, total_tokens=pack), [])

    def remaining(self) -> Iterator[StreamItem]:
        while self._taken < self._last:
            yield self.next()

    def _needed(self) -> int:
        """Return the size of the next sample: its tokens in a pack, or 1 in a dense batch."""
        if self._data.max_tokens_per_pack is None:
            return 1
        return self._data.selection_length(self._size(self._number()), self._spec)

    def _number(self) -> int:
        number = self._taken * self._num_streams + self._stream
        return number if self._data.dataset_size is None else number % self._data.dataset_size

    def _size(self, number: int) -> tuple[int, int, int]:
        # A hash gives each stream all shapes, even if the number of streams is a multiple of the number of shapes.
        if len(self._sizes) == 1:
            return self._sizes[0]
        return self._sizes[sample_id(f"shape-{self._seed}-{number}") % len(self._sizes)]

    def _take(self) -> Clip:
        number = self._number()
        self._taken += 1
        return self._sample(number)

    def _draw_pattern(self, label: int, size: tuple[int, int, int]) -> Tensor:
        """Return the mean latent of a class: a wave with its own direction and phase."""
        t, h, w = (torch.arange(n, dtype=torch.float32) for n in size)
        phase = 0.7 * label + torch.arange(self._spec.latent_channels, dtype=torch.float32)
        angle = 0.2 * t[:, None, None] + (0.3 + 0.1 * (label % 5)) * h[:, None] + (0.2 + 0.1 * (label % 3)) * w
        return torch.sin(phase[:, None, None, None] + angle)

    def sample(self, number: int) -> Clip:
        key = f"mock-{self._split}-{self._seed}-{number}"
        address = sample_id(key)
        generator = torch.Generator().manual_seed(address)
        size = self._size(number)
        spec = self._spec
        label = spec.condition(LABEL.name)
        kind = address % (10 if label is None else label.num_classes or 10)
        latent = 0.5 * torch.randn(spec.latent_channels, *size, generator=generator) + self._pattern(kind, size)
        latent = latent.expand(-1, frames_to_patch(size[0], spec.patch_temporal), -1, -1)
        conditions: dict[str, Value] = {LABEL.name: kind}
        if size[0] > 1:
            conditions[FPS.name] = FRAMES_PER_SECOND
        for condition in spec.conditions:
            # Half of the samples store a condition with a default, but only clips a frame rate.
            if condition.name not in (LABEL.name, FPS.name) and (condition.default is None or address % 2):
                derived = None if condition.derive is None else condition.derive(latent)
                conditions[condition.name] = self._draw(condition, size, generator) if derived is None else derived
        return Clip(
            __key__=key,
            __restore_key__=(),
            latent=latent,
            metadata={},
            conditions=conditions,
            id=address,
            grid=grid_of(*size, *spec.patch),
        )

    def _draw(self, condition: Condition, size: tuple[int, int, int], generator: torch.Generator) -> Value:
        """Draw a condition: a class, a number or vector, a text of random length, or a picture."""
        if condition.num_classes is not None:
            return int(torch.randint(condition.num_classes, (), generator=generator))
        shape = condition.shape or ()
        if condition.axis == "text":
            most = self._data.text_tokens
            length = int(torch.randint((most + 1) // 2, most + 1, (), generator=generator))
            return torch.randn(length, *shape, generator=generator)
        if condition.is_per_token:
            sides = size if condition.axis == "latent" else grid_of(*size, *self._spec.patch)
            return torch.randn(*shape, *sides, generator=generator)
        if condition.is_number:
            low, high = _interval(*condition.limits)
            return low + (high - low) * float(torch.rand((), generator=generator))
        return torch.randn(*shape, generator=generator)

    def state(self) -> Position:
        return Position({"taken": self._taken, "seed": self._seed})

    def load(self, state: dict[str, Any]) -> None:
        if state["seed"] != self._seed:
            raise DataError(
                f"the data state was made with seed {state['seed']}, this run has {self._seed}; set it back"
            )
        self._taken = state["taken"]


def with_references(batch: PackedBatch) -> PackedBatch:
    """Make the last rows of two of three samples one or two clean references, by the id of the sample.

    Columns are divided between two references, so that both have other sizes than the sample.
    """
    grids, references, segments, positions_T3 = [], [], [], batch.positions_T3.clone()
    for number, start, (t, h, w) in zip(batch.sample_ids_S.tolist(), batch.layout.starts, batch.grids):
        rows = max(1, h // 3) if number % 3 and h > 1 else 0
        first = max(1, w // 3) if number % 3 == 2 and w > 1 else w
        grid, columns = (t, h - rows, w), (first, w - first)
        grids.append(grid)
        references.append(tuple((t, rows, n) for n in columns if rows and n))
        segments.append([(math.prod(grid), 0), (t * rows * w, CLEAN)] if rows else [])
        positions_T3[start : start + t * h * w] = torch.cat(
            [grid_positions(grid), *reference_positions(references[-1], grid)]
        )
    return replace(
        batch,
        positions_T3=positions_T3,
        grids=tuple(grids),
        reference_grids=tuple(references) if any(references) else (),
        layout=with_levels(batch.layout, segments),
    )


def _interval(low: float, high: float) -> tuple[float, float]:
    """Return a finite interval between two limits, of width 1 or 2 if a limit is infinite."""
    if math.isfinite(low):
        return low, high if math.isfinite(high) else low + 1
    return (high - 1, high) if math.isfinite(high) else (-1.0, 1.0)
