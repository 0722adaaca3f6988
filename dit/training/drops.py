"""Reports of dropped samples, over all ranks."""

from typing import Self

from dit.backends.process_groups import ProcessGroups, gather_objects
from dit.checkpoint.train_state import TrainState
from dit.data_api import SampleCounts
from dit.monitoring.run_log import RunLog
from dit.terminal import counted


class DropReport:
    """Reports the first dropped sample of each reason, and each doubling of its count."""

    def __init__(self) -> None:
        self._total = 0
        self._printed: dict[str, int] = {}

    @classmethod
    def restored(cls, state: TrainState, groups: ProcessGroups) -> Self:
        """Return a report in which the drops of earlier attempts are old; every rank calls this at the start."""
        counts, report = _all_counts(state, groups), cls()
        report._total = counts.dropped.total()
        report.lines(counts)
        return report

    def report(self, state: TrainState, total: int, groups: ProcessGroups, log: RunLog) -> None:
        """Record an incident and print lines if samples were dropped since the last report; every rank calls this.

        Args:
            total: number of samples dropped so far, equal on all ranks, because a collective follows if it has grown.
        """
        reported, self._total = self._total, total
        if total == reported:
            return
        counts = _all_counts(state, groups)
        log.incident("samples_dropped", state.step, samples=total - reported, total=total, by_reason=counts.by_reason())
        for line in self.lines(counts):
            log.message(f"step {state.step}: {line}")

    def lines(self, counts: SampleCounts) -> list[str]:
        """Return a line for each reason whose count is new or has doubled since its last line."""
        lines, used = [], counted(counts.used.total(), "sample")
        for reason, count in counts.by_reason().items():
            if count < 2 * self._printed.get(reason, 0):
                continue
            self._printed[reason] = count
            dropped, example = counted(count, "sample"), counts.examples.get(reason, reason)
            # No share, because buffers have thousands of samples that were read and are not used yet.
            lines.append(f"{dropped} dropped so far, while reading ahead of the {used} used, {example}")
        unused = [(kind, n) for kind, n in counts.dropped_by_kind().items() if kind and not counts.used[kind]]
        everything = "".join(f"; no {kind} was used, all {n:,} were dropped" for kind, n in unused)
        return [line + everything for line in lines]


def _all_counts(state: TrainState, groups: ProcessGroups) -> SampleCounts:
    counts = state.stream.sample_counts() if groups.is_data_reader else SampleCounts()
    return sum(gather_objects(counts), SampleCounts())
