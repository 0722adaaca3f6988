"""A finite pass over held-out data, divided among the data-parallel ranks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Optional

from dit.batch import PackedBatch
from dit.errors import DataError
from energon_data.frame_levels import FrameLevels
from energon_data.skip_log import SkipLog
from energon_data.streams import StreamItem


def divide_limit(sizes: Sequence[int], limit: Optional[int]) -> list[Optional[int]]:
    """Divide a number of held-out samples over data sets in proportion to their sizes; None for no limit.

    The parts sum to the limit, or to all samples if there are fewer.
    """
    total = sum(sizes)
    if limit is None or limit >= total:
        return [None] * len(sizes)
    ends = [limit * end // total for end in accumulate(sizes)]
    return [end - start for start, end in zip([0, *ends], ends)]


def share_validation(
    items: Iterable[StreamItem], dp_rank: int, dp_size: int, log: SkipLog, origin: str, levels: FrameLevels
) -> Iterator[PackedBatch]:
    """Divide a finite pass among the data-parallel ranks: rank `r` gets the micro-batches `r`, `r + dp_size`, ...

    Every rank gets equally many. If their number is not a multiple of the ranks, later ranks also get the last
    micro-batch, marked as `repeated`.

    Args:
        levels: draws the noise levels of clips.
    """
    number = -1
    for number, item in enumerate(items):
        log.record(0, item.skips, item.batch)
        if item.is_bug:
            raise RuntimeError(f"reading {origin} failed:\n{item.failure}")
        if item.batch is None:
            raise DataError(
                f"validation on {origin} ended: {item.failure}; dropped: {log.counts().by_reason() or 'nothing'}"
            )
        batch = levels(item.batch)
        if number % dp_size == dp_rank:
            yield batch
    if number < 0:
        raise DataError(
            f"validation on {origin} gives no micro-batch; dropped: {log.counts().by_reason() or 'nothing'}"
        )
    if number % dp_size < dp_rank:
        yield replace(batch, repeated=True)
