"""Count every sample that does not reach training, by reason, and end the run when too many were lost.

Two kinds are kept apart. A *lost* sample is damage (unreadable, wrong checksum, refused format, not finite) and uses up
the budget; a *dropped* sample is one the settings filter out (too long, low score) and does not.

The worker that meets such a sample writes it into its `Ledger`; the entries travel to the main process together with
the next micro-batch, where `SkipLog` adds them up. So counts are exact on every layout, with and without background
workers, after every resume, and the run ends at the same step wherever the sample was met.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from dit.errors import DataError

GIVE_UP_AFTER = 10_000
"""Samples skipped in a row, without one that is good, after which the data is taken to be unusable."""


@dataclass(frozen=True)
class Skip:
    """One sample that was not used.

    Attributes:
        reason: short word it is counted under.
        lost: damage, as opposed to filtered out on purpose.
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
        budget: lost samples after which reading on is pointless.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._skips: list[Skip] = []
        self._lost = 0
        self._in_a_row = 0

    def kept(self) -> None:
        """Note a good sample."""
        self._in_a_row = 0

    def skip(self, skip: Skip) -> None:
        """Note a sample that is not used.

        Raises:
            GiveUp: the budget is used up, or nothing but skipped samples come.
        """
        self._skips.append(skip)
        self._lost += skip.lost
        self._in_a_row += 1
        if self._lost > self.budget or self._in_a_row >= GIVE_UP_AFTER:
            raise GiveUp

    def drain(self) -> list[Skip]:
        """Hand out the entries made since the last call."""
        skips, self._skips = self._skips, []
        return skips


class SkipLog:
    """What the streams of one rank skipped so far, in the main process.

    Args:
        budget: lost samples allowed.
        file: where every skipped sample is appended as one JSON line; None for nowhere.
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
            with self.file.open("a") as f:
                f.write("".join(lines))
        if over is not None:
            raise DataError(
                f"lost {over}. Samples lost: {self._lost.total()}, allowed: {self.budget}; repair the shard or make "
                "the data set anew; where only some samples are like this, data.max_lost_samples=N trains without them"
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
