"""Global streams: the order of the data does not depend on the number of ranks.

A run reads `num_streams` streams. Micro-batch `j` of the run comes from stream `j % num_streams`. Data-parallel rank
`r` runs the micro-batches `r, r + dp_size, ...`, on any `dp_size`. `num_streams` 4:

    micro-batch     0   1   2   3   4   5   6   7   ...
    stream          s0  s1  s2  s3  s0  s1  s2  s3
    dp_size 2       r0  r1  r0  r1  r0  r1  r0  r1       rank 0 reads s0, s2; rank 1 reads s1, s3
    dp_size 4       r0  r1  r2  r3  r0  r1  r2  r3       rank r reads s_r
    dp_size 8       r0  r1  r2  r3  r4  r5  r6  r7       ranks r and r + 4 read s_r; each uses every other micro-batch

Each rank that shares a stream reads all of its micro-batches and discards those of the other ranks.

Every draw of a sample has a unique number: the k-th sample of stream `s` is draw `k * num_streams + s`. If a step is
larger than the data, copies of a sample have different numbers, and therefore different noise.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from dit.batch import PackedBatch
from dit.data_api import BatchSpec, DataConfig, SampleCounts
from dit.errors import ConfigError, DataError
from dit.fixed_packs import PackMaxima
from dit.ranges import COUNT, RANKS, SHARE, check_ranges, check_unused, divisors, ranged
from energon_data.frame_levels import FrameLevels
from energon_data.packing import padded_length
from energon_data.skip_log import SKIP_FILE, Skip, SkipLog

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class StreamSettings(DataConfig):
    """Streams and packs of every data source.

    Attributes:
        num_streams: global streams, a divisor of a step's micro-batches, at best the number of replicas; None for the
            largest up to 8.
        max_tokens_per_pack: pack samples up to this many tokens; None for dense batches.
        pack_multiple_of: select samples as if padded to a multiple of this.
        clean_first_frame: share of clips whose first frame is clean, for image to video.
        frame_levels: share of clips with a noise level for every frame.
        inpaint: share of other samples with only a random region noised.
    """

    num_streams: Optional[int] = ranged(None, RANKS)
    max_tokens_per_pack: Optional[int] = ranged(None, COUNT)
    pack_multiple_of: int = ranged(16, COUNT)
    clean_first_frame: float = ranged(0.0, SHARE)
    frame_levels: float = ranged(0.0, SHARE)
    inpaint: float = ranged(0.0, SHARE)

    def pack_maxima(self) -> Optional[PackMaxima]:
        if self.max_tokens_per_pack is None:
            return None
        samples = self.max_tokens_per_pack // self.pack_multiple_of
        return PackMaxima(
            self.max_tokens_per_pack, samples, None if self.longest_text is None else samples * self.longest_text
        )

    @property
    def levels_of_frames(self) -> FrameLevels:
        """Draws of the noise levels inside samples."""
        return FrameLevels(self.clean_first_frame, self.frame_levels, self.inpaint)

    def levels_setting(self) -> Optional[str]:
        names = ("clean_first_frame", "frame_levels", "inpaint")
        return next((f"data.{name}={getattr(self, name)}" for name in names if getattr(self, name)), None)

    def check_streams(self, micro_batches_per_step: int) -> None:
        """Check ranges of settings, and that the streams divide the micro-batches of a step."""
        check_ranges("data", self)
        check_streams(self.num_streams, micro_batches_per_step)

    def check_packs(self, spec: BatchSpec) -> None:
        """Check the settings of packs against the layout; without packs, that they are not set."""
        if self.max_tokens_per_pack is None:
            names = ("pad_packs", "pack_cost_tokens", "packing_buffer_size", "pack_multiple_of")
            unused = [field.name for field in fields(self) if field.name in names]
            check_unused("data", self, unused, "without data.max_tokens_per_pack", "set data.max_tokens_per_pack")
            return
        if spec.micro_batch_size != 1:
            raise ConfigError(
                f"with data.max_tokens_per_pack a micro-batch is one pack, but micro_batch_size is "
                f"{spec.micro_batch_size}; set micro_batch_size=1 and a longer pack"
            )
        multiple = self.pack_multiple_of
        if multiple % spec.multiple_of:
            raise ConfigError(
                f"data.pack_multiple_of={multiple}, by which samples are selected into packs, must be a multiple of "
                f"{spec.multiple_of}, to which the run pads each sample (context and sequence parallel, training.fp8); "
                f"set data.pack_multiple_of={math.lcm(multiple, spec.multiple_of)}, which a resumed run may change"
            )
        for name in ("max_tokens_per_pack", "pack_cost_tokens"):
            if (limit := getattr(self, name, None)) is not None and limit % multiple:
                raise ConfigError(
                    f"data.{name}={limit} must be a multiple of data.pack_multiple_of={multiple}; use "
                    f"{padded_length(limit, multiple)}, or data.pack_multiple_of={math.gcd(limit, multiple)}"
                )

    @property
    @abstractmethod
    def origin(self) -> str:
        """Name of the data, for messages."""

    @property
    def damaged_samples_allowed(self) -> int:
        """Number of damaged samples that a data-parallel rank may drop."""
        return 0

    @abstractmethod
    def source_opener(self, spec: BatchSpec, seed: int, micro_batches_per_step: int) -> Callable[..., "Source"]:
        """Return a picklable function of the keywords `stream` and `num_streams` that opens this source."""

    def open_stream(self, open_source: Callable[[], "Source"], stream: int) -> "Source":
        """Open a stream for training."""
        return open_source()

    def build_train(
        self,
        spec: BatchSpec,
        *,
        dp_rank: int,
        dp_size: int,
        seed: int,
        log_dir: Optional[str],
        micro_batches_per_step: int = 1,
    ) -> "StreamGroup":
        """Build this rank's endless streams; dropped samples are appended to `log_dir/data_skipped.jsonl`."""
        open_source = self.source_opener(spec, seed, micro_batches_per_step)

        def opened(num_streams: int) -> dict[int, Source]:
            shared_by = dp_size // math.gcd(num_streams, dp_size)
            if dp_rank == 0 and shared_by > 1:
                logger.info(
                    "%d replicas share %d data streams and read the data %d times; in a new run, set "
                    "data.num_streams=%d",
                    dp_size,
                    num_streams,
                    shared_by,
                    math.lcm(num_streams, dp_size),
                )
            streams = streams_of(dp_rank, dp_size, num_streams)
            return {s: self.open_stream(partial(open_source, stream=s, num_streams=num_streams), s) for s in streams}

        def reopened(num_streams: int) -> dict[int, Source]:
            if num_streams not in range(1, micro_batches_per_step + 1) or micro_batches_per_step % num_streams:
                size, rest = divmod(micro_batches_per_step * spec.micro_batch_size, math.lcm(num_streams, dp_size))
                raise ConfigError(
                    f"the data state has {num_streams} streams, and a step of {micro_batches_per_step} micro-batches "
                    "would use them unequally; set training.micro_batch_size"
                    + (" and global_batch_size to their previous values" if rest else f"={size}")
                )
            return opened(num_streams)

        num_streams = self.num_streams or automatic_streams(micro_batches_per_step)
        return StreamGroup(
            opened(num_streams),
            num_streams=num_streams,
            dp_rank=dp_rank,
            dp_size=dp_size,
            log=SkipLog(self.damaged_samples_allowed, None if log_dir is None else Path(log_dir) / SKIP_FILE),
            origin=self.origin,
            levels=self.levels_of_frames,
            reopen=reopened if self.num_streams is None else None,
        )

    def share_validation(self, items: Iterable["StreamItem"], dp_rank: int, dp_size: int) -> Iterator[PackedBatch]:
        """Divide a finite pass among the data-parallel ranks: rank `r` gets the micro-batches `r`, `r + dp_size`, ...

        Every rank gets equally many. If their number is not a multiple of the ranks, later ranks also get the last
        micro-batch, marked as `repeated`.
        """
        number, log = -1, SkipLog(self.damaged_samples_allowed)
        for number, item in enumerate(items):
            log.record(0, item.skips, item.batch)
            batch = self.levels_of_frames(item.require_batch(f"validation on {self.origin}", log))
            if number % dp_size == dp_rank:
                yield batch
        if number < 0:
            raise DataError(
                f"validation on {self.origin} gives no micro-batch; dropped: {log.counts().by_reason() or 'nothing'}"
            )
        if number % dp_size < dp_rank:
            yield replace(batch, repeated=True)


@dataclass
class StreamItem:
    """One item of a stream: a micro-batch, or the reason why there is none, and the samples skipped before it.

    Attributes:
        seconds: time that a worker process needed for it; None if it was read while training waited.
        late: whether training requested it before it was ready.
    """

    batch: Optional[PackedBatch]
    skips: list[Skip]
    failure: Optional[str] = None
    is_bug: bool = False
    seconds: Optional[float] = None
    late: bool = True

    def require_batch(self, stream: str, log: SkipLog) -> PackedBatch:
        """Return the micro-batch.

        Raises:
            RuntimeError: the code that reads the stream failed.
            DataError: there is no micro-batch.
        """
        if self.is_bug:
            raise RuntimeError(f"{stream} failed:\n{self.failure}")
        if self.batch is None:
            raise DataError(
                f"{stream} ended: {self.failure or 'there is no more data'}; "
                f"dropped so far: {log.counts().by_reason() or 'nothing'}"
            )
        return self.batch


MAX_DEFAULT_STREAMS = 8
"""Largest default of `data.num_streams`: one stream per GPU of a typical node."""


class Position(NamedTuple):
    """A position in a stream: `offset` items after `state`, which consists of plain containers."""

    state: dict[str, Any]
    offset: int = 0


class Source(ABC):
    """One global stream."""

    @abstractmethod
    def next(self) -> StreamItem:
        """Return the next item; do not call after a failure."""

    @abstractmethod
    def state(self) -> Position:
        """Return the position after the last item."""

    def adapt(self, position: Position) -> Position:
        """Convert a position that was saved with other grouping settings; the next sample does not change."""
        return position

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state of a position; call before the first `next`."""

    def close(self) -> None:  # noqa: B027, for sources without files and workers
        """Close files and stop workers."""


def check_settings_changed(saved: Mapping[str, Any], settings: Mapping[str, Any], may_change: set[str]) -> bool:
    """Return whether settings differ from those of a saved position.

    Raises:
        ConfigError: one that is not in `may_change` differs.
    """
    changed = [name for name, now in settings.items() if saved.get(name) != now]
    if not set(changed) <= may_change:
        listed = ", ".join(f"{name} was {saved.get(name)} and is {settings[name]}" for name in changed)
        raise ConfigError(
            f"the position in the data was saved with other settings ({listed}), where it refers to other samples; set "
            "them back, or start a new run from these weights: another training.run_dir and checkpoint.start_from=this "
            "one"
        )
    return bool(changed)


def read_up_to(source: Source, position: Position) -> dict[str, Any]:
    """Read a new source up to a position; return its state there."""
    source.load(position.state)
    for _ in range(position.offset):
        if (item := source.next()).batch is None:
            raise DataError(f"the stream cannot be read up to the saved position: {item.failure}")
    return source.state().state


def automatic_streams(micro_batches_per_step: int) -> int:
    """Return the default number of streams: the largest divisor of a step's micro-batches up to a limit."""
    return max(n for n in range(1, MAX_DEFAULT_STREAMS + 1) if micro_batches_per_step % n == 0)


def check_streams(num_streams: Optional[int], micro_batches_per_step: int) -> int:
    """Return the number of global streams; None selects `automatic_streams`."""
    n = automatic_streams(micro_batches_per_step) if num_streams is None else num_streams
    if micro_batches_per_step % n:
        low = micro_batches_per_step // n * n
        counts = " or ".join(str(m) for m in (low, low + n) if m)
        choices = divisors(micro_batches_per_step)
        raise ConfigError(
            f"a step of {micro_batches_per_step} micro-batches (global_batch_size / micro_batch_size) must be a "
            f"multiple of data.num_streams={n}; use {counts} micro-batches, or num_streams one of {choices}"
        )
    return n


def streams_of(dp_rank: int, dp_size: int, num_streams: int) -> range:
    """Return the global streams that a data-parallel rank reads."""
    shared = math.gcd(num_streams, dp_size)
    return range(dp_rank % shared, num_streams, shared)


class StreamGroup:
    """The micro-batches of one data-parallel rank.

    Args:
        sources: the rank's streams by global number, see `streams_of`.
        reopen: opens the rank's streams of another number of global streams; None if the number may not change.
    """

    def __init__(
        self,
        sources: Mapping[int, Source],
        *,
        num_streams: int,
        dp_rank: int,
        dp_size: int,
        log: SkipLog,
        origin: str,
        levels: FrameLevels = FrameLevels(),  # noqa: B008
        reopen: Optional[Callable[[int], Mapping[int, Source]]] = None,
    ) -> None:
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._log, self._origin, self._levels, self._reopen = log, origin, levels, reopen
        self._consumed = 0  # micro-batches of all ranks; stored modulo lcm(num_streams, dp_size)
        self._use(sources, num_streams)
        self._to_discard: dict[int, int] = {}  # items between a loaded state and its position, by stream
        self._made, self._made_in_s, self._at_once, self._late = 0, 0.0, 1, 0

    def _use(self, sources: Mapping[int, Source], num_streams: int) -> None:
        self._sources, self._num_streams = dict(sorted(sources.items())), num_streams
        self._read = dict.fromkeys(self._sources, 0)  # items read, by stream
        self._drawn = dict.fromkeys(self._sources, 0)  # samples read, by stream

    def __iter__(self) -> "StreamGroup":
        return self

    def __next__(self) -> PackedBatch:
        number = self._consumed + self._dp_rank
        stream, index = number % self._num_streams, number // self._num_streams
        while self._read[stream] < index:
            self._read_one(stream, is_own=False)  # a micro-batch of another rank
        batch = self._read_one(stream, is_own=True)
        self._consumed += self._dp_size
        return batch

    def _read_one(self, stream: int, *, is_own: bool) -> PackedBatch:
        source = self._sources[stream]
        began = time.perf_counter()
        item = source.next()
        for _ in range(self._to_discard.pop(stream, 0)):
            if item.batch is not None:
                item = source.next()
        waited = time.perf_counter() - began
        self._log.record(stream, item.skips, item.batch, is_reported=is_own)
        batch = item.require_batch(f"stream {stream} of {self._origin}", self._log)
        count = batch.layout.num_samples
        draws_S = (torch.arange(count) + self._drawn[stream]) * self._num_streams + stream
        self._read[stream] += 1
        self._drawn[stream] += count
        self._late += item.late and is_own
        self._made += count * is_own
        self._made_in_s += waited if item.seconds is None else item.seconds
        self._at_once = 1 if item.seconds is None else len(self._sources)
        return self._levels(replace(batch, draws_S=draws_S))

    def _consumed_of(self, stream: int) -> int:
        """Return the number of consumed micro-batches that came from a stream."""
        return (self._consumed - stream - 1) // self._num_streams + 1

    def state_dict(self) -> dict[str, Any]:
        """Return, in plain containers, the positions of streams whose last consumed micro-batch this rank used."""
        return {
            "format": 1,
            "num_streams": self._num_streams,
            "dp_size": self._dp_size,
            "next": self._consumed % math.lcm(self._num_streams, self._dp_size),
            "streams": {
                s: {
                    "position": (position := source.state()).state,
                    "behind": position.offset + self._to_discard.get(s, 0),
                    "skipped": self._log.state(s),
                    "drawn": self._drawn[s],
                }
                for s, source in self._sources.items()
                if self._read[s] == self._consumed_of(s)
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the union of the `state_dict`s of any number of ranks, with its number of streams."""
        if state.get("format", 1) != 1 or not {"streams", "num_streams", "next"} <= set(state):
            raise DataError("this is not a data state of format 1; use the version that saved it, or start a new run")
        if (num_streams := state["num_streams"]) != self._num_streams:
            if self._reopen is None:
                raise ConfigError(
                    f"the data state has {num_streams} streams, this run reads {self._num_streams}, which would repeat "
                    f"some samples and lose others; set data.num_streams={num_streams} or data.num_streams=None"
                )
            sources = self._reopen(num_streams)
            self.close()
            self._use(sources, num_streams)
        if state["next"] % self._dp_size:
            raise DataError(
                f"the data state was saved inside a step on {state['dp_size']} data-parallel ranks; resume on as many "
                f"ranks, not {self._dp_size}"
            )
        streams = {int(s): value for s, value in state["streams"].items()}
        missing = [s for s in self._sources if s not in streams]
        if missing:
            raise DataError(f"the data state lacks the streams {missing}; merge the states of all data-parallel ranks")
        self._consumed = state["next"]
        for s, source in self._sources.items():
            position = source.adapt(Position(streams[s]["position"], streams[s]["behind"]))
            source.load(position.state)
            self._read[s] = self._consumed_of(s)
            self._to_discard[s] = position.offset
            is_first = s % math.gcd(self._num_streams, self._dp_size) == self._dp_rank  # of the ranks that share it
            self._log.load(s, streams[s]["skipped"], is_reported=is_first)
            self._drawn[s] = streams[s]["drawn"]

    def samples_per_s(self) -> float:
        """Return the samples per second that this rank's streams can produce, measured since the last call."""
        rate = self._at_once * self._made / self._made_in_s if self._made_in_s else 0.0
        self._made, self._made_in_s = 0, 0.0
        return rate

    def late(self) -> int:
        """Return the number of micro-batches since the last call that were not ready when requested."""
        late, self._late = self._late, 0
        return late

    def sample_counts(self) -> SampleCounts:
        """Return the counts of used and dropped samples in this rank's micro-batches."""
        return self._log.counts()

    def close(self) -> None:
        """Stop all workers."""
        for source in self._sources.values():
            source.close()
