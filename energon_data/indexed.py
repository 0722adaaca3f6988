"""Data with random access: base class for sources with `__len__` and `__getitem__`.

`Samples` handles the order, held-out samples, packing, distribution over ranks, and resuming:

    permutation of epoch e     7 2 9 | 0 4 1 | 3 8 5 ...      draw d of the run is entry d % n of epoch d // n
    stream s of 3              draws s, s + 3, s + 6, ...      on any number of ranks (see `energon_data.streams`)
"""

import errno
import hashlib
import json
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.condition_table import TABLE
from dit.data_api import WITHOUT_HELD_OUT, BatchSpec
from dit.errors import ConfigError, DataError
from dit.ranges import COUNT_OR_ZERO, ranged
from energon_data.cookers import cook_clip
from energon_data.filters import Filters
from energon_data.packing import buffer_limit
from energon_data.reader_settings import ReaderSettings
from energon_data.samples import LATENT, REFERENCE, Clip, SampleError
from energon_data.skip_log import SkipCounter, TooManyDroppedError
from energon_data.streams import Position, Source, StreamItem, check_settings_changed, read_up_to
from energon_data.task_encoder import DiffusionTaskEncoder, EncoderOptions

HELD_OUT_SEED = 0
IDENTITY_SAMPLES = 64  # read by `Samples.identity`


@dataclass
class Sample:
    """A sample of `Samples`.

    Attributes:
        latent: `[C, H, W]` for an image or `[C, T, H, W]` for a clip; pixels in [-1, 1] for a pixel-space model.
        conditions: values by name: a class or number, or an array, such as `label=3` and `text=[K, D]`. With
            `data.references`, `reference` is a latent that the sample is edited from, `reference-1` a second one.
    """

    latent: Tensor | np.ndarray
    conditions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Samples(ReaderSettings):
    """A data source with random access; a subclass adds its fields, `__len__` and `__getitem__`.

    `__getitem__` may raise any exception for a damaged sample, which is then dropped and counted.

    Attributes:
        same_shape: whether all samples have the shape of the first, as convolutional networks need.
        validation_samples: number of samples held out from training, selected at random; 0 for none.
    """

    worker_modules: ClassVar[tuple[str, ...]] = ("dit.training.pretrain",)  # a recipe in a subclass's module imports it

    same_shape: bool = False
    validation_samples: int = ranged(0, COUNT_OR_ZERO)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @property
    def origin(self) -> str:
        return type(self).__name__

    def mixes_shapes(self, spec: BatchSpec) -> bool:
        return not self.same_shape and (self.max_tokens_per_pack is not None or spec.micro_batch_size > 1)

    def check_settings(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        self.check_streams(micro_batches_per_step)
        self.check_references(spec)
        self.check_packs(spec)

    def validate(self, spec: BatchSpec, dp_size: int, micro_batches_per_step: int) -> None:
        """Check the settings, the number of samples, and the first sample that is not dropped.

        Raises:
            ConfigError: a setting is out of range, or no sample is left for training.
        """
        self.check_settings(spec, dp_size, micro_batches_per_step)
        if len(self) <= self.validation_samples:
            raise ConfigError(
                f"{self.origin} has {len(self)} samples and data.validation_samples={self.validation_samples} leaves "
                "none for training; use fewer"
            )
        counter = SkipCounter(self.max_lost_samples)
        encoder, clips = self._encoder(spec, counter), (partial(_clip, self, i) for i in range(len(self)))
        with suppress(TooManyDroppedError):
            if any(encoder.encoded_clip(str(i), self.origin, clip) is not None for i, clip in enumerate(clips)):
                return
        raise DataError(f"{counter.drain()[0]}; correct {self.origin}.__getitem__")

    def _encoder(self, spec: BatchSpec, counter: SkipCounter) -> DiffusionTaskEncoder:
        options = EncoderOptions(
            filters=Filters(max_tokens=self.max_tokens_per_pack),
            max_text_tokens=self.max_text_tokens,
            references=self.references,
            max_tokens_per_pack=self.max_tokens_per_pack,
            pack_multiple_of=self.pack_multiple_of,
        )
        return DiffusionTaskEncoder(spec, options, counter)

    def source_opener(self, spec: BatchSpec, seed: int, micro_batches_per_step: int) -> Callable[..., Source]:
        return partial(IndexedSource, self, spec, seed=seed)

    def validate_held_out(self, otherwise: str = WITHOUT_HELD_OUT) -> None:
        if not self.validation_samples:
            raise ConfigError(f"{self.origin} has no held-out samples; set data.validation_samples, {otherwise}")

    def build_validation(self, spec: BatchSpec, *, dp_rank: int, dp_size: int) -> Iterator[PackedBatch]:
        self.validate_held_out()
        source = IndexedSource(self, spec, seed=0, stream=0, num_streams=1, held_out=True)
        return self.share_validation(source.remaining(), dp_rank, dp_size)

    def identity(self) -> dict[str, dict[str, str]]:
        """Return the number of samples and a digest of up to 64 evenly spaced samples, which are read here.

        Override it if reading a sample is slow, or does not give the same bits on every machine.

        Raises:
            OSError: the operating system failed to read a sample that exists.
        """
        count, digest = len(self), hashlib.sha256()
        samples = min(count, IDENTITY_SAMPLES)
        for i in range(samples):
            digest.update(_content(self, i * count // samples))
        return {"": {self.origin: f"{count} samples, digest {digest.hexdigest()[:16]}"}}

    def stored_conditions(self) -> set[str]:
        """Return the names of the conditions of the first sample that can be read."""
        clip = _first_clip(self)
        stems = {name.removesuffix(".npy") for name in clip.parts if name.partition("-")[0] != f"{REFERENCE}.npy"}
        return {*clip.metadata, *stems} - {LATENT}

    def remarks(self, spec: BatchSpec) -> list[str]:
        """Return a line with the values of the first sample under names of no condition."""
        names = {name for condition in (*TABLE, *spec.conditions) for name in condition.stored_as}
        unread = sorted(self.stored_conditions() - names)
        return [f"{self.origin} gives {', '.join(unread)}, which the model does not take"] if unread else []


def _clip(samples: Samples, index: int) -> Clip:
    """Convert a sample to the form that shards are decoded to: numbers in the metadata, arrays as parts."""
    sample = samples[index]
    numbers, parts = {}, {"latent.npy": _array(sample.latent)}
    for name, value in sample.conditions.items():
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
            parts[f"{name}.npy"] = _array(value)
        elif isinstance(value, (int, float)):
            numbers[name] = value
        elif hasattr(value, "item"):  # of an array of one number
            numbers[name] = value.item()
        else:
            kind = _type_name(value)
            raise SampleError("metadata", f"{name} is a {kind}, not a number or an array; convert it, or leave it out")
    sample_parts = {"json": numbers, **parts, "__key__": str(index), "__shard__": samples.origin}
    return cook_clip(sample_parts, references=samples.references)


def _first_clip(samples: Samples) -> Clip:
    """Return the first sample that can be read, after at most `max_lost_samples` others."""
    last = min(samples.max_lost_samples, len(samples) - 1)
    for index in range(last):
        with suppress(Exception):
            return _clip(samples, index)
    return _clip(samples, last)


def _content(samples: Samples, index: int) -> bytes:
    """Return a digest of a sample's numbers and arrays, or of the kind of error of a damaged one.

    Raises:
        OSError: the operating system failed to read the sample. Decoders raise `OSError` without `errno`.
    """
    try:
        clip = _clip(samples, index)
        digest = hashlib.sha256(json.dumps(clip.metadata, sort_keys=True, default=_type_name).encode())
        for name, array in sorted(clip.parts.items()):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(b"" if array.dtype.hasobject else array.tobytes())  # bytes of objects are addresses
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise  # it may be transient, and the digest must be the same in every start
        return _type_name(error).encode()
    return digest.digest()


def _type_name(value: object) -> str:
    return type(value).__name__


def _array(value: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(value, Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    return np.ascontiguousarray(value) if value.ndim else value  # torch takes no negative strides


class IndexedSource(Source):
    """One global stream of `Samples`.

    Args:
        held_out: read the held-out samples once, instead of the training samples endlessly.
    """

    def __init__(
        self, samples: Samples, spec: BatchSpec, *, seed: int, stream: int, num_streams: int, held_out: bool = False
    ) -> None:
        self._samples, self._spec, self._seed = samples, spec, seed
        self._stream, self._num_streams = stream, num_streams
        self._counter = SkipCounter(samples.max_lost_samples)
        self._encoder = samples._encoder(spec, self._counter)
        shuffled = _permutation(HELD_OUT_SEED, len(samples))
        count = samples.validation_samples
        self._indices = shuffled[:count] if held_out else shuffled[count:]
        self._last = len(self._indices) if held_out else math.inf
        self._taken = 0  # samples that were read
        self._before = 0  # samples that were read before the current buffer
        self._delivered = 0  # batches delivered from the current buffer
        self._skipped = frozenset[int]()  # samples after a converted position that were delivered before it
        self._batches: deque[list[Clip]] = deque()

    def next(self) -> StreamItem:
        failure = "no sample is left"
        try:
            while not self._batches and self._taken < self._last:
                self._read()
        except TooManyDroppedError:
            failure = "too many samples were dropped"
        if not self._batches:
            return StreamItem(None, self._counter.drain(), failure)
        self._delivered += 1
        return StreamItem(self._encoder.batch(self._batches.popleft()), self._counter.drain())

    def remaining(self) -> Iterator[StreamItem]:
        """Yield the micro-batches up to the last sample, then the failure if there is one."""
        while (item := self.next()).batch is not None:
            yield item
        if self._taken < self._last:
            yield item

    def _read(self) -> None:
        """Read samples for some packs, or for one dense batch."""
        self._before, self._delivered = self._taken, 0
        clips, passes, is_packed = list[Clip](), -1, self._samples.max_tokens_per_pack is not None
        size = self._samples.packing_buffer_size if is_packed else self._spec.micro_batch_size
        of_pass = size is None
        size = size or buffer_limit(-(-len(self._indices) // self._num_streams))
        while len(clips) < size and self._taken < self._last:
            number, (epoch, position) = self._taken, self._place(self._taken)
            if of_pass and epoch > self._place(number - 1)[0]:
                passes = passes + 1 if clips else 0  # complete passes in `clips`
                if clips and not self._encoder.another_pass_fits(passes, clips):
                    break
            index = int(self._indices[_permutation(self._seed + 1 + epoch, len(self._indices))[position]])
            self._taken += 1
            if number in self._skipped:
                continue
            clip = self._encoder.encoded_clip(str(index), self._samples.origin, partial(self._clip, index))
            if clip is not None:
                clip.__restore_key__ = (number,)
                clips.append(clip)
        if clips:
            self._batches.extend(self._encoder.select_samples_to_pack(clips) if is_packed else [clips])

    def _place(self, number: int) -> tuple[int, int]:
        """Return the epoch of a sample of this stream, and its position there."""
        return divmod(number * self._num_streams + self._stream, len(self._indices))

    def _clip(self, index: int) -> Clip:
        clip = _clip(self._samples, index)
        if self._samples.same_shape and clip.latent.shape != self._shape:
            raise SampleError(
                "wrong_shape",
                f"the latent is {list(clip.latent.shape)} but that of the first sample is {list(self._shape)}; resize "
                "it, or set data.same_shape=False for a network that supports several shapes",
            )
        return clip

    @cached_property
    def _shape(self) -> torch.Size:
        """Shape of the latent of the first sample, the same for all streams and positions."""
        return _first_clip(self._samples).latent.shape

    def _settings(self) -> dict[str, Any]:
        """Return the settings that determine which samples follow a position."""
        names = ("max_tokens_per_pack", "pack_multiple_of", "packing_buffer_size", "validation_samples")
        settings = {name: getattr(self._samples, name) for name in names}
        size, count = self._spec.micro_batch_size, len(self._samples)
        return settings | {"micro_batch_size": size, "size": count, "seed": self._seed}

    def state(self) -> Position:
        """Return the number of samples before the current buffer, and of micro-batches delivered from it."""
        taken, delivered = (self._before, self._delivered) if self._batches else (self._taken, 0)
        skipped = [number for number in sorted(self._skipped) if number >= taken]
        state = {"taken": taken, "settings": self._settings()}
        return Position(state | ({"skipped": skipped} if skipped else {}), delivered)

    def adapt(self, position: Position) -> Position:
        """Convert a position to one that is equal under the current settings.

        If `pack_multiple_of` or the size of dense micro-batches changed, the items after the state are read with the
        former settings, and samples of the buffer that were not delivered are selected again.
        """
        settings = self._settings()
        saved = position.state["settings"]
        if not check_settings_changed(saved, settings, {"pack_multiple_of", "micro_batch_size"}):
            return position
        former = IndexedSource(
            replace(self._samples, pack_multiple_of=saved["pack_multiple_of"]),
            replace(self._spec, micro_batch_size=saved["micro_batch_size"], multiple_of=1),
            seed=self._seed,
            stream=self._stream,
            num_streams=self._num_streams,
        )
        state = read_up_to(former, position)
        read = {*state.get("skipped", ()), *range(state["taken"], former._taken)}
        skipped = read - {clip.__restore_key__[0] for clips in former._batches for clip in clips}
        return Position({"taken": state["taken"], "settings": settings, "skipped": sorted(skipped)})

    def load(self, state: dict[str, Any]) -> None:
        self._taken, self._skipped = state["taken"], frozenset(state.get("skipped", ()))


@lru_cache(maxsize=4)
def _permutation(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)
