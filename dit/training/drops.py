"""Reports of dropped samples, over all ranks."""

import torch.distributed as dist

from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.train_state import TrainState
from dit.data_api import SampleCounts
from dit.monitoring.run_log import RunLog


def report_drops(state: TrainState, total: int, groups: ProcessGroups, log: RunLog) -> None:
    """Record an incident and print lines if samples were dropped since the last report; every rank calls this.

    Args:
        total: number of samples dropped so far, equal on all ranks.
    """
    reported, log.drops.total = log.drops.total, total
    if total == reported:
        return
    counts = _all_counts(state, groups)
    log.incident("samples_dropped", state.step, samples=total - reported, total=total, by_reason=counts.by_reason())
    for line in log.drops.lines(counts):
        log.message(f"step {state.step}: {line}")


def restore_drops(state: TrainState, groups: ProcessGroups, log: RunLog) -> None:
    """Mark the drops of earlier attempts as reported; every rank calls this at the start."""
    counts = _all_counts(state, groups)
    log.drops.total = counts.dropped.total()
    log.drops.lines(counts)


def _all_counts(state: TrainState, groups: ProcessGroups) -> SampleCounts:
    gathered = [SampleCounts() for _ in range(groups.dp_size)]
    dist.all_gather_object(gathered, state.stream.sample_counts(), group=groups.dp)
    return sum(gathered, SampleCounts())
