"""Generate many samples in batches, distributed over ranks; each sample has a seed and a number."""

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
    """A sample to generate.

    Attributes:
        seed: of its noise; None for the seed shared by all samples.
        number: counts the samples of one seed.
        references: latents `[C, T, H, W]` that it is edited from.
    """

    caption: str
    conditions: Mapping[str, Value]
    negative: Mapping[str, Value]
    seed: Optional[int]
    number: int
    record: dict[str, Any] = field(default_factory=dict)
    references: tuple[Tensor, ...] = ()


def numbered(seeds: Sequence[Optional[int]], count: int) -> list[tuple[Optional[int], int]]:
    """Return (seed, number) of `count` samples for each seed, grouped by seed.

    Samples of one seed are numbered from 0, so that they do not depend on other seeds. Samples with seed None are
    numbered by their place in the list.
    """
    pairs: list[tuple[Optional[int], int]] = []
    for i, seed in enumerate(seeds):
        pairs += [(seed, i * count + j if seed is None else j) for j in range(count)]
    return pairs


def batches(requests: Sequence[Request], batch_size: int) -> list[list[int]]:
    """Split requests into batches of indices; all samples of a batch have conditions of the same names."""

    def names(index: int) -> tuple[set[str], set[str]]:
        return set(requests[index].conditions), set(requests[index].negative)

    index_batches: list[list[int]] = []
    for _, group in groupby(range(len(requests)), key=names):
        indices = list(group)
        index_batches += [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    return index_batches


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
    """Generate samples; yields the indices of a batch, and its latents `[N, C, T, H, W]`.

    A rank generates the batches rank, rank + world_size, ... The batches do not depend on the number of ranks, so the
    samples are bit-identical on any number of ranks. `on_step` is called at the start of each solver step with the
    number of this rank's batch and of the step.
    """
    for place, indices in enumerate(batches(requests, batch_size)[rank::world_size]):
        batch = [requests[i] for i in indices]
        conditions, negative = (
            {name: [getattr(request, part)[name] for request in batch] for name in getattr(batch[0], part)}
            for part in ("conditions", "negative")
        )
        seeds = [request.seed for request in batch]
        references = [request.references for request in batch]
        yield (
            indices,
            generator.generate(
                count=len(batch),
                conditions=conditions or None,
                negative=negative or None,
                seeds=None if set(seeds) == {None} else seeds,
                numbers=[request.number for request in batch],
                references=references if any(references) else None,
                on_step=partial(on_step, place),
                **settings,
            ),
        )
