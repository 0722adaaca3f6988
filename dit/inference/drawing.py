"""Drawing many samples: in batches, over the ranks, each sample by its own seed and number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Optional

from torch import Tensor

from dit.conditions import Value

if TYPE_CHECKING:
    from dit.inference.generator import Generator


@dataclass(frozen=True)
class Request:
    """What one sample is to show.

    Attributes:
        caption: above it in a grid.
        conditions: of the model, by name.
        negative: conditions that guidance leads away from, by name.
        seed: of its noise; None for that of all.
        number: counts the samples of one seed.
        record: what was asked for, as plain values.
    """

    caption: str
    conditions: Mapping[str, Value]
    negative: Mapping[str, Value]
    seed: Optional[int]
    number: int
    record: dict[str, Any] = field(default_factory=dict)


def numbered(seeds: Sequence[Optional[int]], count: int) -> list[tuple[Optional[int], int]]:
    """Return seed and number of `count` samples of each of these seeds, one seed's behind another's.

    Those without a seed of their own are numbered through, those of a seed from 0: a sample with its own seed does not
    depend on the others.
    """
    found: list[tuple[Optional[int], int]] = []
    for i, seed in enumerate(seeds):
        found += [(seed, i * count + j if seed is None else j) for j in range(count)]
    return found


def batches(requests: Sequence[Request], batch_size: int) -> list[list[int]]:
    """Cut requests into batches of indices; all samples of a batch have the same conditions, by name."""

    def names(index: int) -> tuple[set[str], set[str]]:
        return set(requests[index].conditions), set(requests[index].negative)

    found: list[list[int]] = []
    for _, group in groupby(range(len(requests)), key=names):
        alike = list(group)
        found += [alike[start : start + batch_size] for start in range(0, len(alike), batch_size)]
    return found


def draw(
    generator: "Generator",
    requests: Sequence[Request],
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    on_step: Callable[[int, int], None] = lambda batch, step: None,
    **settings: Any,
) -> Iterator[tuple[list[int], Tensor]]:
    """Generate samples, batch by batch.

    The batches do not depend on the number of ranks, so neither do the samples, to the bit.

    Args:
        batch_size: most samples at a time.
        rank, world_size: this rank draws the batches rank, rank + world_size, ...
        on_step: called with the number of this rank's batch and of the solver step when a step starts.
        settings: of `Generator.generate`.

    Yields:
        The indices of a batch, and its latents `[N, C, T, H, W]`.
    """
    for place, indices in enumerate(batches(requests, batch_size)[rank::world_size]):
        asked = [requests[i] for i in indices]
        given, negative = (
            {name: [getattr(request, part)[name] for request in asked] for name in getattr(asked[0], part)}
            for part in ("conditions", "negative")
        )
        own = [request.seed for request in asked]
        yield (
            indices,
            generator.generate(
                count=len(asked),
                conditions=given or None,
                negative=negative or None,
                seeds=None if set(own) == {None} else own,
                numbers=[request.number for request in asked],
                on_step=partial(on_step, place),
                **settings,
            ),
        )
