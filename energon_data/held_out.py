"""A finite pass over held-out data, split over the data-parallel ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dit.batch import PackedBatch
from dit.errors import DataError
from energon_data.skip_log import SkipLog
from energon_data.streams import StreamItem


def share_validation(
    deliveries: Iterable[StreamItem], dp_rank: int, dp_size: int, log: SkipLog, origin: str
) -> Iterator[PackedBatch]:
    """Split a finite pass over the data-parallel ranks: rank `r` gets the micro-batches `r`, `r + dp_size`, ...

    Every rank gets equally many. Where their number is no multiple of the ranks, the later ranks get the last one, too,
    marked as `repeated`.

    Raises:
        DataError: the pass is empty or broken.
    """
    number = -1
    for number, delivery in enumerate(deliveries):
        log.record(0, delivery.skips, delivery.batch)
        if delivery.is_bug:
            raise RuntimeError(f"reading {origin} failed:\n{delivery.failure}")
        if delivery.batch is None:
            raise DataError(
                f"validation on {origin} ended: {delivery.failure}; dropped: {log.counts().by_reason() or 'nothing'}"
            )
        batch = delivery.batch
        if number % dp_size == dp_rank:
            yield batch
    if number < 0:
        raise DataError(
            f"validation on {origin} gives no micro-batch; dropped: {log.counts().by_reason() or 'nothing'}"
        )
    if number % dp_size < dp_rank:
        yield replace(batch, repeated=True)
