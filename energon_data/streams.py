"""Global streams: the order of the data does not depend on the number of ranks.

A run reads `num_streams` streams. Micro-batch `j` of the run comes from stream `j % num_streams`. Data-parallel rank
`r` runs the micro-batches `r, r + dp_size, ...`, so it reads the streams `s` with `s % dp_size == r`, in turn. With
another `dp_size` that divides `num_streams`, streams only move between ranks. `num_streams` 4:

    micro-batch     0   1   2   3   4   5   6   7   ...
    stream          s0  s1  s2  s3  s0  s1  s2  s3
    dp_size 2       r0  r1  r0  r1  r0  r1  r0  r1       rank 0 reads s0, s2; rank 1 reads s1, s3
    dp_size 4       r0  r1  r2  r3  r0  r1  r2  r3       rank r reads s_r

Every draw of a sample has a unique number: the k-th sample of stream `s` is draw `k * num_streams + s`. If a step is
larger than the data, copies of a sample have different numbers, and therefore different noise.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional, Protocol

import torch

from dit.batch import PackedBatch
from dit.errors import ConfigError, DataError
from energon_data.skip_log import Skip, SkipLog


@dataclass
class Delivery:
    """One item of a stream: a micro-batch, or the reason why there is none, and the samples skipped before it.

    Attributes:
        seconds: that it took to make, where it was made in a worker process; None if it was made while training waited.
        late: whether training asked for it before it was made.
    """

    batch: Optional[PackedBatch]
    skips: list[Skip]
    failure: Optional[str] = None
    is_bug: bool = False
    seconds: Optional[float] = None
    late: bool = True


class Position(NamedTuple):
    """Where a stream is: `behind` deliveries after `state`, which is in plain containers."""

    state: dict[str, Any]
    behind: int = 0


class Source(Protocol):
    """One global stream."""

    def next(self) -> Delivery: ...

    def state(self) -> Position:
        """Return the position after the last delivery."""

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state of a position; called before the first `next`."""

    def close(self) -> None: ...


def check_streams(num_streams: Optional[int], dp_size: int, micro_batches_per_step: int) -> int:
    """Return the number of global streams.

    Raises:
        ConfigError: it does not fit the data-parallel size or the batch size.
    """
    n = dp_size if num_streams is None else num_streams
    if n < 1 or n % dp_size:
        near = sorted({max(dp_size, n // dp_size * dp_size), (n // dp_size + 1) * dp_size})
        raise ConfigError(
            f"data.num_streams={n} must be a multiple of the data-parallel size {dp_size}; "
            f"nearest are {' and '.join(map(str, near))}"
        )
    if micro_batches_per_step % n:
        low = micro_batches_per_step // n * n
        near = [m for m in (low, low + n) if m]
        fitting = [d for d in range(dp_size, micro_batches_per_step + 1, dp_size) if micro_batches_per_step % d == 0]
        raise ConfigError(
            f"a step of {micro_batches_per_step} micro-batches (global_batch_size / micro_batch_size) must be a "
            f"multiple of data.num_streams={n}; use {' or '.join(map(str, near))} micro-batches, or num_streams one of "
            f"{fitting}"
        )
    return n


class StreamGroup:
    """The streams of one data-parallel rank, taken in turn.

    Args:
        sources: this rank's streams by global number.
        num_streams: global streams of the run.
        log: counts skipped samples.
        origin: name of the data, for messages.
    """

    def __init__(
        self, sources: Mapping[int, Source], *, num_streams: int, dp_size: int, log: SkipLog, origin: str
    ) -> None:
        self._sources = dict(sorted(sources.items()))
        self._order = list(self._sources)
        self._num_streams, self._dp_size = num_streams, dp_size
        self._log, self._origin = log, origin
        self._cursor = 0
        self._drawn = dict.fromkeys(self._order, 0)  # samples by stream
        self._behind: dict[int, int] = {}  # deliveries by stream that were consumed before the state was saved
        self._made, self._made_in_s, self._at_once, self._late = 0, 0.0, 1, 0

    def __iter__(self) -> "StreamGroup":
        return self

    def __next__(self) -> PackedBatch:
        number = self._order[self._cursor]
        source = self._sources[number]
        began = time.perf_counter()
        delivery = source.next()
        for _ in range(self._behind.pop(number, 0)):
            if delivery.batch is not None:
                delivery = source.next()
        waited = time.perf_counter() - began
        self._late += delivery.late
        self._log.record(number, delivery.skips)
        if delivery.is_bug:
            raise RuntimeError(f"reading stream {number} of {self._origin} failed:\n{delivery.failure}")
        if delivery.batch is None:
            raise DataError(
                f"stream {number} of {self._origin} ended: {delivery.failure or 'there is no more data'}; "
                f"skipped so far: {self._log.counts() or 'nothing'}"
            )
        self._cursor = (self._cursor + 1) % len(self._order)
        count = delivery.batch.layout.num_samples
        draws_S = (torch.arange(count) + self._drawn[number]) * self._num_streams + number
        self._drawn[number] += count
        self._made += count
        self._made_in_s += waited if delivery.seconds is None else delivery.seconds
        self._at_once = 1 if delivery.seconds is None else len(self._order)
        return replace(delivery.batch, draws_S=draws_S)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of every stream this rank reads, in plain containers."""
        return {
            "format": 1,
            "num_streams": self._num_streams,
            "dp_size": self._dp_size,
            "next": self._cursor * self._dp_size,
            "streams": {
                s: {
                    "position": position.state,
                    "behind": position.behind + self._behind.get(s, 0),
                    "skipped": self._log.state(s),
                    "drawn": self._drawn[s],
                }
                for s, position in ((s, source.state()) for s, source in self._sources.items())
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a union of `state_dict`s.

        Raises:
            DataError: the state has another number of streams, lacks a stream of this rank, or was saved between two
                micro-batches of a step with another data-parallel size.
        """
        if state.get("format", 1) != 1 or not {"streams", "num_streams", "next"} <= set(state):
            raise DataError("this is no data state of format 1; start the data anew or use the version that saved it")
        if state["num_streams"] != self._num_streams:
            raise DataError(
                f"the data state has {state['num_streams']} streams, this run reads {self._num_streams}, which would "
                f"repeat some samples and lose others; set data.num_streams={state['num_streams']}"
            )
        saved_dp_size = state.get("dp_size", self._dp_size)
        if state["next"] and saved_dp_size != self._dp_size:
            raise DataError(
                f"the data state was saved inside a step on {saved_dp_size} data-parallel ranks; resume on as many "
                f"ranks, not {self._dp_size}"
            )
        streams = {int(s): value for s, value in state["streams"].items()}
        missing = [s for s in self._order if s not in streams]
        if missing:
            raise DataError(f"the data state lacks the streams {missing}; merge the states of all data-parallel ranks")
        for s, source in self._sources.items():
            source.load(streams[s]["position"])
            self._behind[s] = streams[s].get("behind", 0)
            self._log.load(s, streams[s]["skipped"])
            # Older states have no count; any other number is valid for the noise.
            self._drawn[s] = streams[s].get("drawn", 0)
        self._cursor = state["next"] // self._dp_size

    def samples_per_s(self) -> float:
        """Return how many samples this rank's streams make in a second, since the last call; all workers at work."""
        rate = self._at_once * self._made / self._made_in_s if self._made_in_s else 0.0
        self._made, self._made_in_s = 0, 0.0
        return rate

    def late(self) -> int:
        """Return how many micro-batches since the last call were not there when they were asked for."""
        late, self._late = self._late, 0
        return late

    def skipped(self) -> dict[str, int]:
        """Return how many samples were lost or dropped so far, by reason."""
        return self._log.counts()

    def close(self) -> None:
        """Stop all workers."""
        for source in self._sources.values():
            source.close()
