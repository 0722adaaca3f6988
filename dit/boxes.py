"""Boxes: axis-aligned blocks of a tensor's index space, the unit in which state is stored.

A rank owns a range of a flattened parameter (distributed optimizer, FSDP) that may itself be a tensor-parallel part.
In the index space of the full parameter such a range is a few boxes:

    range [3, 13) of a 4 x 4 tensor        . . . a
                                           b b b b       a: offsets (0, 3), sizes (1, 1)
                                           b b b b       b: offsets (1, 0), sizes (2, 4)
                                           c . . .       c: offsets (3, 0), sizes (1, 1)

Boxes do not depend on the layout: a reader does not need to know the layout that wrote them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A block of a tensor: the elements at `offsets` to `offsets + sizes`, along every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Box":
        """Return the box of a full tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a scalar."""
        return math.prod(self.sizes)

    def shifted(self, origin: Sequence[int]) -> "Box":
        """Convert a box of a part that begins at `origin` to the full tensor's index space."""
        return Box(tuple(o + s for o, s in zip(self.offsets, origin, strict=True)), self.sizes)

    def overlap(self, other: "Box") -> Optional["Box"]:
        """Return the elements that are in both, None if there are none."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (min(a + s, b + t) for a, s, b, t in zip(self.offsets, self.sizes, other.offsets, other.sizes))
        sizes = tuple(end - start for start, end in zip(starts, ends))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return the indices of this box within a tensor of just `outer`."""
        return tuple(slice(a - b, a - b + s) for a, s, b in zip(self.offsets, self.sizes, outer.offsets))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Split a range of a flattened (row-major) tensor into at most 2 x dimensions - 1 boxes, in order of elements."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # complete rows
    if first > last:  # within one row
        yield from _in_row(last, shape, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(first - 1, shape, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(last, shape, 0, stop - last * row)


def _in_row(index: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))


@dataclass(frozen=True)
class Part:
    """The position of a range of this rank's part of a parameter in the full parameter.

    Attributes:
        local_shape: of this rank's (tensor-parallel) part of it.
        origin: index of the first element of that part.
        start, stop: range of the flattened part.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    origin: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements of the range."""
        return self.stop - self.start

    def share(self, index: int, count: int) -> "Part":
        """Return the `index`-th of `count` equal parts of the range, so that each rank with a copy writes one part."""
        start, stop = (self.start + self.size * i // count for i in (index, index + 1))
        return Part(self.shape, self.local_shape, self.origin, start, stop)

    def views(self, values: Tensor, start: int) -> Iterator[tuple[Box, Tensor]]:
        """Yield each box of the range, in the full parameter's index space, with its elements of `values`.

        Args:
            values: contiguous, the elements of the flattened part from `start` on; the yielded tensors are views of it.
            start: not after the range's own.
        """
        flat, position = values.detach().view(-1), self.start - start
        for box in boxes_of_range(self.local_shape, self.start, self.stop):
            yield box.shifted(self.origin), flat[position : position + box.numel].view(box.sizes)
            position += box.numel
