"""Changes to the captions of a user: a default, a prefix, and other orders of their tags.

    "a, b, c, d" with tag_orders=3, keep_tags=1, prefix="photo,"
        photo, a, b, c, d        original order, which validation reads
        photo, a, d, b, c        other orders of the tags; the first tag is fixed
        photo, a, c, d, b

All orders are stored as captions of one sample; training draws one of them at each reading.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial
from typing import Optional

from dit.data_api import sample_id
from dit.errors import ConfigError

MAX_ORDERS = 100


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Changes to the captions of files.

    Attributes:
        tag_orders: number of stored captions per file: its first caption with the comma-separated tags in different
            orders. Training draws one of them at each reading. 1 leaves the captions unchanged.
        keep_tags: number of tags at the beginning that are not shuffled.
    """

    default: Optional[str] = None
    prefix: str = ""
    tag_orders: int = 1
    keep_tags: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tag_orders <= MAX_ORDERS:
            raise ConfigError(f"--shuffle-tags {self.tag_orders} must be between 1 and {MAX_ORDERS} stored orders")
        if self.keep_tags < 0:
            raise ConfigError(f"--keep-tags {self.keep_tags} must be at least 0")
        if self.keep_tags and self.tag_orders == 1:
            raise ConfigError(f"--keep-tags {self.keep_tags} has no effect without --shuffle-tags")

    def apply(self, captions: Sequence[str], name: str) -> tuple[str, ...]:
        if not captions:
            captions = () if self.default is None else (self.default,)
        if captions and self.tag_orders > 1:
            captions = self._shuffled(captions[0], name)
        space = " " if self.prefix and not self.prefix[-1].isspace() else ""
        return tuple(f"{self.prefix}{space}{caption}" for caption in captions)

    def _shuffled(self, caption: str, name: str) -> list[str]:
        """Return a caption unchanged, and with its tags in other orders, all different."""
        tags = [tag for tag in map(str.strip, caption.split(",")) if tag]
        fixed, moving = tags[: self.keep_tags], tags[self.keep_tags :]
        order = random.Random(sample_id(f"tags/{name}"))
        captions = {tuple(moving): caption}
        while len(captions) < min(self.tag_orders, factorial(len(set(moving)))):
            order.shuffle(moving)
            captions.setdefault(tuple(moving), ", ".join([*fixed, *moving]))
        return list(captions.values())
