"""Generator of docs/settings.md, which lists every setting of every part, from the dataclasses.

`python -m tests.support.settings_page --write` writes the page; without `--write` it is printed.
"""

import dataclasses
import inspect
import re
import sys
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
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
    "model": [f"dit.models.{settings}" for settings, _ in BACKBONES.values()],
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

SUMMARISED = ("data", "objective", "schedule")
"""Parts whose classes are described; README.md describes backbones."""

HEAD = """# Settings

<!-- Written by `python -m tests.support.settings_page --write`; a test keeps it true. Edit the docstrings instead. -->

Each line is `key=default` (other values or types, except numbers, words and lists): meaning. The key follows the name
of its part: `training.num_steps=100`. None (`none` or `null` on the command line) switches an option off, unless its
meaning says otherwise. A class also has the settings of the classes under "Also", of the shared settings only those in
brackets. `--dryrun` prints its defaults, which may differ. Select classes by name: `objective=ddpm(prediction='v')`. A
value out of range, or without effect because of others, is an error.
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
        """The default, and the values and types that it does not show, except for numbers, words and lists."""
        shown = {f"`{self.default}`", str(self.default), type(self.default).__name__, "int", "float", "str", "list"}
        others = [kind for kind in self.kind if kind.partition("[")[0] not in shown]
        return f"{self.assignment} ({', '.join(others)})" if others else self.assignment

    def usual(self, others: Sequence["Row"]) -> "Row":
        """Return the most frequent form of this setting among the rows of several classes."""
        rows_by_form = {(row.assignment, frozenset(row.kind)): row for row in others if row.key == self.key}
        forms = Counter((row.assignment, frozenset(row.kind)) for row in others if row.key == self.key)
        return rows_by_form[forms.most_common(1)[0][0]] if forms else self

    def changes(self, base: "Row") -> list[str]:
        """Return the form of this setting if its types differ from those of a base."""
        return [self.choices] if frozenset(self.kind) != frozenset(base.kind) else []


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


SHARED = "Shared settings"
"""Title of settings that classes without a common base describe in the same words."""


def with_bases(kinds: Sequence[type]) -> list[type]:
    """Return classes after their bases with settings; a base of one class only is left out."""
    counts = Counter(base for kind in kinds for base in kind.__mro__ if dataclasses.is_dataclass(base))
    return [
        kind
        for kind in dict.fromkeys((*chain.from_iterable(reversed(one.__mro__) for one in kinds), *kinds))
        if kind in kinds or (counts[kind] > 1 and dataclasses.fields(kind))
    ]


def nearest_bases(kind: type, listed: Sequence[type]) -> list[type]:
    """Return the listed bases of a class without bases of these."""
    bases = [base for base in kind.__mro__[1:] if base in listed]
    return [base for base in bases if not any(base in other.__mro__[1:] for other in bases)]


def part(kinds: Sequence[type], *, summaries: bool) -> Iterator[str]:
    """Yield the blocks of a part: settings that unrelated classes share, bases, and classes.

    A base has the most frequent defaults of its classes. A class has a line about settings that are listed elsewhere:
    its bases with the types that differ, and all shared settings, because not every class has all of them.
    """
    listed = with_bases(kinds)
    tables = {kind: list(rows(kind)) for kind in listed}
    for base in (kind for kind in listed if kind not in kinds):
        heirs = [row for kind in kinds if issubclass(kind, base) for row in tables[kind]]
        tables[base] = [row.usual(heirs) for row in tables[base]]
    new: dict[type, list[Row]] = {}
    titles: dict[type, dict[str, list[str]]] = {}
    for kind, table in tables.items():
        inherited = {row.key: (base, row) for base in nearest_bases(kind, listed)[::-1] for row in tables[base]}
        new[kind] = [row for row in table if row.key not in inherited]
        titles[kind] = {base.__name__: [] for base in nearest_bases(kind, listed)}
        for row in table:
            if row.key in inherited:
                base, common = inherited[row.key]
                titles[kind][base.__name__] += row.changes(common)
    shared: dict[Key, Row] = {}
    for key, count in Counter(row.key for table in new.values() for row in table).items():
        if count > 1:
            group = [(kind, row) for kind, table in new.items() for row in table if row.key == key]
            shared[key] = group[0][1]
            for kind, row in group:
                own_type = frozenset(row.kind) != frozenset(shared[key].kind)
                titles[kind].setdefault(SHARED, []).append(row.choices if own_type else f"`{row.name}`")
    if shared:
        yield from section(SHARED, "", "", list(shared.values()))
    for kind in listed:
        also = ", ".join(f"{title} ({', '.join(names)})" if names else title for title, names in titles[kind].items())
        summary = _summary(kind) if summaries and kind in kinds else ""
        rest = [row for row in new[kind] if row.key not in shared]
        yield from section(kind.__name__, summary, f"Also: {also}." if also else "", rest)


def page() -> str:
    """Return docs/settings.md."""
    blocks = [HEAD]
    for name, paths in PARTS.items():
        kinds = [getattr(import_module(module), kind) for module, kind in (path.split(":") for path in paths)]
        blocks += [f"## {name}\n", *part(kinds, summaries="." in name or name in SUMMARISED)]
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
