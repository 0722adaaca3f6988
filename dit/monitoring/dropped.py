"""Console lines about dropped samples."""

from dit.data_api import SampleCounts


class DropReport:
    """Reports the first dropped sample of each reason, and each doubling of its count."""

    def __init__(self) -> None:
        self.total = 0
        self._printed: dict[str, int] = {}

    def lines(self, counts: SampleCounts) -> list[str]:
        """Return a line for each reason whose count is new or has doubled since its last line."""
        lines = []
        read = counts.used.total() + counts.dropped.total()
        for reason, count in counts.by_reason().items():
            if count < 2 * self._printed.get(reason, 0):
                continue
            self._printed[reason] = count
            lines.append(f"{count:,} of {read:,} samples dropped so far, {counts.examples.get(reason, reason)}")
        unused = [(kind, n) for kind, n in counts.dropped_by_kind().items() if kind and not counts.used[kind]]
        everything = "".join(f"; no {kind} was used, all {n:,} were dropped" for kind, n in unused)
        return [line + everything for line in lines]
