"""Streams that worker processes of tests open. Workers import this module, so its imports are few."""

import gc
import time
from pathlib import Path
from typing import Any, Optional

from dit.data_api import BatchSpec
from energon_data.mock import MockData, MockSource
from energon_data.streams import Position, Source, StreamItem


class Watched(Source):
    """Synthetic samples, with faults and observations for tests.

    Args:
        sample_log: file that gets a byte for each sample.
        fails_at: number of the sample that raises an error instead.
        seconds: delay of each sample.
        collects: collect garbage before each sample.
    """

    def __init__(
        self,
        spec: BatchSpec,
        sample_log: Optional[Path] = None,
        *,
        fails_at: Optional[int] = None,
        seconds: float = 0.0,
        collects: bool = False,
        **settings: Any,
    ) -> None:
        data = MockData(**{"shapes": ["1x4x4", "2x6x4"], **settings})
        self.inner = MockSource(data, spec, seed=1, split="train", stream=0, num_streams=1)
        self.sample_log, self.fails_at, self.seconds, self.collects = sample_log, fails_at, seconds, collects
        self.count = 0

    def next(self) -> StreamItem:
        self.count += 1
        if self.sample_log is not None:
            with self.sample_log.open("ab") as file:
                file.write(b".")
        if self.count == self.fails_at:
            raise ZeroDivisionError("here")
        if self.collects:
            gc.collect()
        time.sleep(self.seconds)
        return self.inner.next()

    def state(self) -> Position:
        return self.inner.state()

    def load(self, state: dict[str, Any]) -> None:
        self.inner.load(state)
