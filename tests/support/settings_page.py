"""Generator of docs/settings.md, which lists every setting of every part, from the dataclasses.

`python -m tests.support.settings_page --write` writes the page; without `--write` it is printed.
"""

import dataclasses
import inspect
import re
import sys
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Optional, TypeAlias, get_type_hints

from dit.models.registry import BACKBONES
from dit.objectives import OBJECTIVES
from tests.support.generated_page import write_or_print

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
PARTS = {
    "model": [entry.config for entry in BACKBONES.values()],
    "model.lora": ["dit.models.lora_config:LoRAConfig"],
    "model.routing": ["dit.models.routing_config:RoutingConfig"],
    "data": ["energon_data.dataset:EnergonData", "energon_data.mock:MockData"],
    "objective": list(OBJECTIVES.values()),
    "objective.alignment": ["dit.objectives.alignment:Alignment"],
    "objective.adversarial": ["dit.objectives.adversarial:Adversarial"],
    "objective.variance": ["dit.objectives.ddpm:LearnedVariance"],
    "objective.weighting": ["dit.objectives.losses:UncertaintyWeighting"],
    "optimizer": ["dit.settings:OptimizerConfig"],
    "schedule": [
        f"dit.optimizer.schedules:{name}"
        for name in ("Constant", "Cosine", "Linear", "WSD", "InverseSqrt", "TorchOneCycle")
    ],
    "parallel": ["dit.parallel.dims:ParallelConfig"],
    "training": ["dit.settings:TrainingConfig"],
    "checkpoint": ["dit.settings:CheckpointConfig"],
    "logging": ["dit.settings:LoggingConfig"],
    "sampling": ["dit.settings:SamplingConfig"],
}
"""The parts of a recipe, by the names of `pretrain`'s arguments, and their classes."""

HEAD = """# Settings

<!-- Written by `python -m tests.support.settings_page --write`; a test keeps it true. Edit the docstrings instead. -->

Each line is `key=default` (other values or types): meaning. The key follows the name of its part:
`training.num_steps=100`. None (`none` or `null` on the command line) switches an option off, unless its meaning says
otherwise. Settings of several classes come first; a class has those listed under "Also", with its defaults and values
in brackets. Select classes by name: `objective=ddpm(prediction='v')`. A value out of range, or without effect because
of other settings, is an error.
"""
_ENTRY = re.compile(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)$")


def own_meanings(kind: type) -> dict[str, str]:
    """Return the description of each field in the `Attributes` or `Args` of a class, without base classes."""
    texts: dict[str, str] = {}
    inside, names = False, list[str]()
    for line in inspect.cleandoc(vars(kind).get("__doc__") or "").splitlines():
        if not line.startswith(" "):
            inside, names = line in ("Attributes:", "Args:") or (inside and not line), []
            continue
        entry = _ENTRY.match(line.strip()) if inside and re.match(r" {4}\S", line) else None
        if entry:
            names = entry[1].split(", ")
            texts.update(dict.fromkeys(names, entry[2]))
        else:
            texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
    return texts


def meanings(kind: type) -> dict[str, tuple[str, type]]:
    """Return the description of each field of a class, and the nearest base class that describes it."""
    texts: dict[str, tuple[str, type]] = {}
    for base in reversed(kind.__mro__):
        texts |= {name: (text, base) for name, text in own_meanings(base).items()}
    return texts


def _alternatives(annotation: object) -> tuple[str, ...]:
    """Return the values and types that an annotation accepts."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(f"`{value}`" for value in arguments)
    if typing.get_origin(annotation) is typing.Union:
        return tuple(chain.from_iterable(map(_alternatives, arguments)))
    if annotation is type(None):
        return ("None",)
    if inspect.isclass(annotation) and not arguments:
        return (annotation.__name__,)
    return (str(annotation).replace("typing.", ""),)


SHARED = 2
"""A setting that at least this many classes of a part share, with the same meaning, is listed once."""


Key: TypeAlias = tuple[str, str]


class Row(NamedTuple):
    """A setting of a class."""

    name: str
    kind: tuple[str, ...]
    """Accepted values and types."""
    default: object
    meaning: str
    owner: type
    """The class with the description."""

    @property
    def key(self) -> Key:
        """Name and meaning."""
        return self.name, self.meaning

    @property
    def assignment(self) -> str:
        """The default in the form of the command line."""
        return f"`{self.name}={str(self.default).replace(', ', ',')}`"

    @property
    def choices(self) -> str:
        """The default, and the types and values that it does not show."""
        shown = {f"`{self.default}`", str(self.default), type(self.default).__name__}
        others = [kind for kind in self.kind if kind.partition("[")[0] not in shown]
        return f"{self.assignment} ({', '.join(others)})" if others else self.assignment


def rows(kind: type) -> Iterator[Row]:
    """Yield the settings of a class.

    Raises:
        ValueError: a field has no description.
    """
    descriptions, types = meanings(kind), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in descriptions:
            raise ValueError(f"{kind.__name__}.{field.name} has no line under `Attributes` or `Args` of its docstring")
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        yield Row(field.name, _alternatives(types[field.name]), default, *descriptions[field.name])


ANY_CLASS = "Shared settings"
"""Title of settings that classes without a common base describe in the same words."""


def shared_rows(tables: Iterable[Sequence[Row]]) -> dict[Key, tuple[str, Row]]:
    """Return the settings that several classes share, each with its title and its most frequent row."""
    by_key: dict[Key, list[Row]] = {}
    for row in chain.from_iterable(tables):
        by_key.setdefault(row.key, []).append(row)
    shared: dict[Key, tuple[str, Row]] = {}
    for key, group in by_key.items():
        if len(group) >= SHARED:
            title = ANY_CLASS if len({row.owner for row in group}) > 1 else group[0].owner.__name__
            kinds = Counter(frozenset(row.kind) for row in group)
            usual = [row for row in group if frozenset(row.kind) == kinds.most_common(1)[0][0]]
            (assignment, _), *_ = Counter(row.assignment for row in usual).most_common(1)
            shared[key] = title, next(row for row in usual if row.assignment == assignment)
    return shared


def inherited(table: Iterable[Row], shared: Mapping[Key, tuple[str, Row]]) -> str:
    """Return a class's line about shared settings: their titles, and the defaults and types that differ.

    Shared settings without a common base are all listed, because not every class has all of them.
    """
    titles: dict[str, list[str]] = {}
    for row in table:
        if row.key in shared:
            title, common = shared[row.key]
            names = titles.setdefault(title, [])
            has_own_type = frozenset(row.kind) != frozenset(common.kind)
            if title == ANY_CLASS or has_own_type or row.assignment != common.assignment:
                names.append(row.choices if has_own_type else row.assignment)
    parts = [f"{title} ({', '.join(names)})" if names else title for title, names in titles.items()]
    return f"Also: {', '.join(parts)}." if parts else ""


def page() -> str:
    """Return docs/settings.md."""
    blocks = [HEAD]
    for part, paths in PARTS.items():
        blocks.append(f"## {part}\n")
        names = [path.split(":") for path in paths]
        tables = {kind: list(rows(kind)) for kind in (getattr(import_module(module), name) for module, name in names)}
        shared = shared_rows(tables.values())
        for title in dict.fromkeys(title for title, _ in shared.values()):
            group = [row for name, row in shared.values() if name == title]
            blocks += section(title, "", "", group)
        for kind, table in tables.items():
            rest = [row for row in table if row.key not in shared]
            blocks += section(kind.__name__, _summary(kind), inherited(table, shared), rest)
    return "\n".join(blocks)


def section(title: str, summary: str, also: str, table: Sequence[Row]) -> Iterator[str]:
    """Yield the blocks of a class."""
    yield f"### {title}\n"
    lines = (
        f"* {', '.join(row.choices for row in group)}: {meaning}"
        for meaning, group in groupby(table, key=attrgetter("meaning"))
    )
    texts = (summary, also, "\n".join(lines))
    yield from (f"{text}\n" for text in texts if text)


def _summary(kind: type) -> str:
    """Return the first line of a docstring."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    return write_or_print("tests.support.settings_page", page, PAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
