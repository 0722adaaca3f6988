"""A finite pass over held-out data, split over the data-parallel ranks."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Optional

from dit.batch import PackedBatch
from dit.errors import DataError
from energon_data.skip_log import SkipLog
from energon_data.streams import Delivery


def share_validation(
    read: Callable[[], Iterator[Delivery]], limit: Optional[int], dp_rank: int, dp_size: int, log: SkipLog, origin: str
) -> Iterator[PackedBatch]:
    """Split a finite pass over the data-parallel ranks, with equally many micro-batches each.

    Args:
        read: starts the pass.
        limit: micro-batches of the pass over all ranks; None for all.

    Raises:
        DataError: the pass is empty or broken.
    """

    def batches(count: Optional[int]) -> Iterator[PackedBatch]:
        for delivery in islice(read(), count):
            log.record(0, delivery.skips)
            if delivery.is_bug:
                raise RuntimeError(f"reading {origin} failed:\n{delivery.failure}")
            if delivery.batch is None:
                raise DataError(
                    f"validation on {origin} ended: {delivery.failure}; skipped: {log.counts() or 'nothing'}"
                )
            yield delivery.batch

    total = 0
    for number, batch in enumerate(batches(limit)):
        total = number + 1
        if number % dp_size == dp_rank:
            yield batch
    if total == 0:
        raise DataError(f"validation on {origin} gives no micro-batch; skipped: {log.counts() or 'nothing'}")
    if total % dp_size and dp_rank >= total % dp_size:
        again = (total // dp_size * dp_size + dp_rank) % total
        log = SkipLog(log.budget)
        yield next(islice(batches(again + 1), again, None))
