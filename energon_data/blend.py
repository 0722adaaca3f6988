"""Blends of data set folders by weight, defined by settings; weights may change at given steps of a run.

    data.blend=[{path: data/images, weight: [1, 1]}, {path: data/clips, weight: [0, 3]}]  data.blend_steps=[10000]

    step      0 ............ 9999 | 10000 .........
    weights   images 1            | images 1, clips 3          stage 0 | stage 1

Each stage starts a new pass: its data are shuffled again, and read from the beginning.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Optional

import yaml

from dit.errors import ConfigError
from dit.ranges import NOT_NEGATIVE
from energon_data.streams import Position, Source, StreamItem


@dataclass(frozen=True)
class Member:
    """A data set of a blend.

    Attributes:
        weights: weight in each stage, relative to the other members.
    """

    path: str
    weights: tuple[float, ...]


def read_blend(blend: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[Member]:
    """Read the settings `data.blend` and `data.blend_steps`.

    Args:
        blend: entries with `path` and `weight`: a number, or a list with one number per stage.
        steps: first step of each stage after the first.
    """
    stages = len(steps) + 1
    if list(steps) != sorted(set(steps)):
        raise ConfigError(f"data.blend_steps={list(steps)} must be ascending")
    if not blend:
        raise ConfigError("data.blend is empty; write data.blend=[{path: DIR, weight: 1}, ...]")
    members = []
    for entry in blend:
        if not isinstance(entry, Mapping) or set(entry) - {"path", "weight"} or not isinstance(entry.get("path"), str):
            raise ConfigError(f"data.blend has the entry {entry!r}; each is {{path: DIR, weight: NUMBER}}")
        weight = entry.get("weight", 1)
        weights = tuple(weight) if isinstance(weight, (list, tuple)) else (weight,) * stages
        if any(isinstance(w, bool) or w not in NOT_NEGATIVE for w in weights):
            raise ConfigError(f"data.blend gives {entry['path']} the weight {weight}; each must be {NOT_NEGATIVE}")
        if len(weights) != stages:
            raise ConfigError(
                f"data.blend gives {entry['path']} {len(weights)} weights; data.blend_steps={list(steps)} makes "
                f"{stages} stages, so give one number or {stages}"
            )
        members.append(Member(entry["path"], weights))
    paths = [member.path for member in members]
    if len(set(paths)) != len(paths):
        raise ConfigError(f"data.blend names a folder twice: {paths}; add up their weights")
    for stage in range(stages):
        if not any(member.weights[stage] for member in members):
            raise ConfigError(f"all weights of data.blend are 0 in stage {stage}; give one of them a weight")
    return members


@contextmanager
def metadataset(parts: Mapping[str, float], split: str) -> Iterator[str]:
    """Write an Energon metadataset that exists in this context.

    Args:
        parts: weight of each folder; folders of weight 0 are skipped.
    """
    blend = [{"path": str(Path(path).absolute()), "weight": weight} for path, weight in parts.items() if weight]
    with tempfile.TemporaryDirectory(prefix="dit-blend-") as folder:
        file = Path(folder) / "blend.yaml"
        content = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {split: {"blend": blend}}}
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        yield str(file)


def divide_limit(sizes: Sequence[int], limit: Optional[int]) -> list[Optional[int]]:
    """Divide a number of held-out samples over data sets in proportion to their sizes; None for no limit.

    The parts sum to the limit, or to all samples if there are fewer.
    """
    total = sum(sizes)
    if limit is None or limit >= total:
        return [None] * len(sizes)
    ends = [limit * end // total for end in accumulate(sizes)]
    return [end - start for start, end in zip([0, *ends], ends)]


class StagedSource(Source):
    """A stream that reads one source after another.

    Args:
        stages: functions that open the source of each stage.
        ends: number of micro-batches after which each stage except the last ends; ascending.
    """

    def __init__(self, stages: Sequence[Callable[[], Source]], ends: Sequence[int]) -> None:
        self._stages, self._ends = stages, ends
        self._num_items = 0
        self._source: Optional[Source] = None

    def _open(self) -> Source:
        if self._source is None:
            self._source = self._stages[sum(self._num_items >= end for end in self._ends)]()
        return self._source

    def next(self) -> StreamItem:
        item = self._open().next()
        self._num_items += 1
        if self._num_items in self._ends:
            self.close()
        return item

    def state(self) -> Position:
        state, offset = self._open().state()
        return Position({"delivered": self._num_items, "ends": list(self._ends), "stage": state}, offset)

    def adapt(self, position: Position) -> Position:
        state = position.state
        ends = state.get("ends", list(self._ends))
        if ends != list(self._ends):
            raise ConfigError(
                f"a stage of data.blend_steps ends after {list(self._ends)} micro-batches of a stream, and ended after "
                f"{ends} when the position in the data was saved; set training.micro_batch_size so that micro-batches "
                "have as many samples as then"
            )
        self._num_items = state["delivered"]
        self.close()
        saved = Position(state["stage"], position.offset)
        adapted = self._open().adapt(saved)
        if adapted is saved:
            return position
        num_items = self._num_items + position.offset
        if any(self._num_items < end <= num_items for end in self._ends):
            raise ConfigError(
                "data.pack_multiple_of changes a few micro-batches before a step of data.blend_steps; resume with the "
                "former value until that step is saved"
            )
        return Position({"delivered": num_items, "ends": ends, "stage": adapted.state})

    def load(self, state: dict[str, Any]) -> None:
        self._num_items = state["delivered"]
        self.close()
        self._open().load(state["stage"])

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = None
