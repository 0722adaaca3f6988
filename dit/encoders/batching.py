"""Which samples an encoder takes together."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def in_batches(keys: Sequence[Key], most: Callable[[Key], int]) -> list[list[int]]:
    """Group items of one key in the order given.

    Args:
        keys: of each item, such as its shape.
        most: returns how many items of a key go together; at least one does.

    Returns:
        The indices of each batch.
    """
    by_key: dict[Key, list[int]] = {}
    for i, key in enumerate(keys):
        by_key.setdefault(key, []).append(i)
    return [
        indices[start : start + size]
        for key, indices in by_key.items()
        for size in [max(1, most(key))]
        for start in range(0, len(indices), size)
    ]
