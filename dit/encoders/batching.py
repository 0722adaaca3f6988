"""Group samples into batches for an encoder."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def in_batches(keys: Sequence[Key], batch_size: Callable[[Key], int]) -> list[list[int]]:
    """Group items with equal keys, in their order.

    Args:
        keys: one per item, such as its shape.
        batch_size: returns the largest batch of items with a key; results below 1 count as 1.
    """
    by_key: dict[Key, list[int]] = {}
    for i, key in enumerate(keys):
        by_key.setdefault(key, []).append(i)
    return [
        indices[start : start + size]
        for key, indices in by_key.items()
        for size in [max(1, batch_size(key))]
        for start in range(0, len(indices), size)
    ]
