"""Changes to the captions of a user: a default, a prefix and a suffix, and other orders of their tags.

    "a, b, c, d" with tag_orders=3, keep_tags=1, prefix="photo,"
        photo, a, b, c, d        as written: held-out data are read with this one
        photo, a, d, b, c        tags in other orders, the first one kept in its place
        photo, a, c, d, b

All orders are stored as captions of one sample, of which training draws one at each reading.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial
from typing import Optional

from dit.data_api import sample_id
from dit.errors import ConfigError

_PUNCTUATION = ",.;:!?"
MAX_ORDERS = 100


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How the captions of a file become those of its samples.

    Attributes:
        default: caption of every file without one of its own.
        prefix, suffix: put before and after every caption; tags that are shuffled stay between them.
        tag_orders: captions to store of each file, its first caption with the comma-separated tags in different orders.
            Training draws one of them at each reading. 1 keeps the captions as they are.
        keep_tags: tags at the beginning that stay in their places.
    """

    default: Optional[str] = None
    prefix: str = ""
    suffix: str = ""
    tag_orders: int = 1
    keep_tags: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tag_orders <= MAX_ORDERS:
            raise ConfigError(f"--shuffle-tags {self.tag_orders} must lie between 1 and {MAX_ORDERS} stored orders")
        if self.keep_tags < 0:
            raise ConfigError(f"--keep-tags {self.keep_tags} must be at least 0")
        if self.keep_tags and self.tag_orders == 1:
            raise ConfigError(f"--keep-tags {self.keep_tags} has no effect without --shuffle-tags")

    def apply(self, captions: Sequence[str], name: str) -> tuple[str, ...]:
        """Return the captions of a file.

        Args:
            captions: its own ones.
            name: of the file; the orders of its tags depend on it and on nothing else.
        """
        if not captions:
            captions = () if self.default is None else (self.default,)
        if captions and self.tag_orders > 1:
            captions = self._shuffled(captions[0], name)
        return tuple(self._framed(caption) for caption in captions)

    def _shuffled(self, caption: str, name: str) -> list[str]:
        """Return a caption as it is, and with its tags in other orders, all different."""
        tags = [tag for tag in map(str.strip, caption.split(",")) if tag]
        kept, moving = tags[: self.keep_tags], tags[self.keep_tags :]
        order = random.Random(sample_id(f"tags/{name}"))
        found = {tuple(moving): caption}
        while len(found) < min(self.tag_orders, factorial(len(set(moving)))):
            order.shuffle(moving)
            found.setdefault(tuple(moving), ", ".join([*kept, *moving]))
        return list(found.values())

    def _framed(self, caption: str) -> str:
        before = f"{self.prefix} " if self.prefix and not self.prefix[-1].isspace() else self.prefix
        joined = self.suffix[:1].isspace() or self.suffix[:1] in _PUNCTUATION  # also where there is none
        return f"{before}{caption}{self.suffix if joined else f' {self.suffix}'}"
