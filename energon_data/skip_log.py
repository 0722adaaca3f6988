"""Counts of dropped samples by reason, and the error budget of damaged samples.

A sample is dropped because it is damaged (unreadable, wrong checksum, refused format, not finite), which counts against
`data.max_lost_samples`, or because the settings exclude it (too long, low score), which does not.

The worker that reads such a sample adds it to its `SkipCounter`. The entries are sent to the main process with the next
micro-batch, and `SkipLog` counts them there. Counts are therefore exact on every layout, with and without background
workers, and after every resume; and the run ends at the same step in all of these cases.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from dit.batch import PackedBatch
from dit.data_api import SampleCounts
from dit.errors import DataError
from dit.safe_files import open_to_append

SKIP_FILE = "data_skipped.jsonl"
"""Dropped samples, in the folder of a run's logs."""
GIVE_UP_AFTER = 10_000
"""Number of consecutive dropped samples after which the data count as unusable."""


@dataclass(frozen=True)
class Skip:
    """One dropped sample.

    Attributes:
        reason: category in which it is counted.
        lost: whether the sample is damaged, not excluded by settings.
        kind: kind of the sample, see `SampleCounts`.
        tokens: number of tokens without padding; 0 if it was not cut into patches.
    """

    reason: str
    key: str
    shard: str
    detail: str
    lost: bool
    kind: str = ""
    tokens: int = 0

    def __str__(self) -> str:
        return f"sample {self.key!r} in shard {self.shard!r}: {self.reason}: {self.detail}"


class TooManyDroppedError(BaseException):
    """Ends a stream from inside Energon; not an `Exception`, because Energon's error handling catches those."""


class SkipCounter:
    """Samples dropped since the last micro-batch, in the process that reads them.

    Args:
        budget: number of damaged samples that the stream may drop.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._skips: list[Skip] = []
        self._lost = 0
        self._in_a_row = 0

    def used(self) -> None:
        self._in_a_row = 0

    def skip(self, skip: Skip) -> None:
        """Record a dropped sample.

        Raises:
            TooManyDroppedError: the budget is exceeded, or too many consecutive samples were dropped.
        """
        self._skips.append(skip)
        self._lost += skip.lost
        self._in_a_row += 1
        if self._lost > self.budget or self._in_a_row >= GIVE_UP_AFTER:
            raise TooManyDroppedError

    def drain(self) -> list[Skip]:
        """Return the entries since the last call."""
        skips, self._skips = self._skips, []
        return skips


class SkipLog:
    """Used and dropped samples of all streams of one rank, in the main process.

    Args:
        budget: number of damaged samples allowed.
        file: file to append every dropped sample to, one JSON line each; None for no file.
    """

    def __init__(self, budget: int, file: Optional[Path] = None) -> None:
        self.budget, self.file = budget, file
        self._by_stream: dict[int, SampleCounts] = {}
        self._reported = SampleCounts()
        self._lost: Counter[int] = Counter()

    def record(
        self, stream: int, skips: Sequence[Skip], batch: Optional[PackedBatch], *, is_reported: bool = True
    ) -> None:
        """Add a micro-batch and the samples dropped before it.

        Args:
            is_reported: whether this rank reports them; False for a micro-batch of another rank that shares the stream.
        """
        all_counts = self._by_stream.setdefault(stream, SampleCounts())
        kinds = ["clip" if grid[0] > 1 else "image" for grid in (() if batch is None else batch.grids)]
        for counts in (all_counts, self._reported) if is_reported else (all_counts,):
            counts.used.update(kinds)
            counts.dropped.update((skip.reason, skip.kind) for skip in skips)
            for skip in skips:
                counts.examples.setdefault(skip.reason, f"the first {skip}")
        over = None
        for skip in skips:
            self._lost[stream] += skip.lost
            if over is None and skip.lost and self._lost.total() > self.budget:
                over = skip
        if skips and self.file is not None and is_reported:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps({"stream": stream, **asdict(skip)}) + "\n" for skip in skips)
            with open_to_append(self.file) as file:
                file.write("".join(lines).encode())
        if over is not None:
            raise DataError(
                f"dropped damaged {over}. Damaged samples: {self._lost.total()}, allowed: {self.budget}; repair "
                "the shard or write the data set again; if only some samples are affected, data.max_lost_samples=N "
                "trains without them"
            )

    def counts(self) -> SampleCounts:
        """Return the counts that this rank reports, over all streams."""
        return self._reported

    def state(self, stream: int) -> dict[str, Any]:
        """Return the counts of one stream in plain containers."""
        counts = self._by_stream.get(stream, SampleCounts())
        dropped = [[reason, kind, n] for (reason, kind), n in counts.dropped.items()]
        return {"dropped": dropped, "used": dict(counts.used), "lost": self._lost[stream]}

    def load(self, stream: int, state: dict[str, Any], *, is_reported: bool = True) -> None:
        """Continue the counts of one stream; only one of the ranks that share it reports them."""
        dropped = {(reason, kind): n for reason, kind, n in state["dropped"]}
        self._by_stream[stream] = SampleCounts(Counter(state["used"]), Counter(dropped))
        if is_reported:
            self._reported += self._by_stream[stream]
        self._lost[stream] = int(state["lost"])
