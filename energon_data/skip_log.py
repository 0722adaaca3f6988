"""Count skipped samples by reason, and end the run if too many were lost.

There are two kinds. A *lost* sample is damaged (unreadable, wrong checksum, refused format, not finite) and counts
against the budget; a *dropped* sample is filtered out by the settings (too long, low score) and does not.

The worker that reads such a sample adds it to its `Ledger`. The entries are sent to the main process with the next
micro-batch, and `SkipLog` counts them there. Counts are therefore exact on every layout, with and without background
workers, and after every resume; and the run ends at the same step in all of these cases.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from dit.errors import DataError
from dit.safe_files import open_to_append

GIVE_UP_AFTER = 10_000
"""Number of consecutive skipped samples after which the data count as unusable."""


@dataclass(frozen=True)
class Skip:
    """One sample that was not used.

    Attributes:
        reason: the word under which it is counted.
        lost: damaged, rather than filtered out.
    """

    reason: str
    key: str
    shard: str
    detail: str
    lost: bool

    def __str__(self) -> str:
        return f"sample {self.key!r} in shard {self.shard!r}: {self.reason}: {self.detail}"


class GiveUp(BaseException):
    """Ends a stream from inside Energon, whose error handling swallows every `Exception`."""


class Ledger:
    """The samples skipped since the last micro-batch, in the process that reads them.

    Args:
        budget: number of lost samples that ends the stream.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._skips: list[Skip] = []
        self._lost = 0
        self._in_a_row = 0

    def used(self) -> None:
        """Record a used sample."""
        self._in_a_row = 0

    def skip(self, skip: Skip) -> None:
        """Record a skipped sample.

        Raises:
            GiveUp: the budget is exceeded, or too many consecutive samples were skipped.
        """
        self._skips.append(skip)
        self._lost += skip.lost
        self._in_a_row += 1
        if self._lost > self.budget or self._in_a_row >= GIVE_UP_AFTER:
            raise GiveUp

    def drain(self) -> list[Skip]:
        """Return the entries since the last call."""
        skips, self._skips = self._skips, []
        return skips


class SkipLog:
    """Skipped samples of all streams of one rank, in the main process.

    Args:
        budget: lost samples allowed.
        file: to which every skipped sample is appended as one JSON line; None for none.
    """

    def __init__(self, budget: int, file: Optional[Path] = None) -> None:
        self.budget, self.file = budget, file
        self._by_stream: dict[int, Counter[str]] = {}
        self._lost: Counter[int] = Counter()

    def record(self, stream: int, skips: Iterable[Skip]) -> None:
        """Add the entries that came with a micro-batch.

        Raises:
            DataError: more samples are lost than the budget allows.
        """
        over = None
        lines = []
        for skip in skips:
            self._by_stream.setdefault(stream, Counter())[skip.reason] += 1
            self._lost[stream] += skip.lost
            lines.append(json.dumps({"stream": stream, **asdict(skip)}) + "\n")
            if over is None and skip.lost and self._lost.total() > self.budget:
                over = skip
        if lines and self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open_to_append(self.file) as file:
                file.write("".join(lines).encode())
        if over is not None:
            raise DataError(
                f"lost {over}. Samples lost: {self._lost.total()}, allowed: {self.budget}; repair the shard or write "
                "the data set again; if only some samples are affected, data.max_lost_samples=N trains without them"
            )

    def counts(self) -> dict[str, int]:
        """Return skipped samples by reason."""
        return dict(sorted(sum(self._by_stream.values(), Counter()).items()))

    def state(self, stream: int) -> dict[str, Any]:
        """Return the counts of one stream in plain containers."""
        return {"reasons": dict(self._by_stream.get(stream, {})), "lost": self._lost[stream]}

    def load(self, stream: int, state: dict[str, Any]) -> None:
        """Continue the counts of one stream."""
        self._by_stream[stream] = Counter(state["reasons"])
        self._lost[stream] = int(state["lost"])
