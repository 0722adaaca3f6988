"""docs/settings.md: every setting of every part, generated from the dataclasses.

`python -m launch.settings_page --write` writes the page; without `--write` it is printed.
"""

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Optional, TypeAlias, get_type_hints

from dit.models.registry import BACKBONES
from dit.objectives import OBJECTIVES
from recipes.registry import write_or_print

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
PARTS = {
    "model": [entry.config for entry in BACKBONES.values()],
    "model.lora": ["dit.models.lora_config:LoRAConfig"],
    "data": ["energon_data.dataset:EnergonData", "energon_data.mock:MockData"],
    "objective": list(OBJECTIVES.values()),
    "objective.adversarial": ["dit.objectives.adversarial:Adversarial"],
    "objective.variance": ["dit.objectives.ddpm:LearnedVariance"],
    "objective.weighting": ["dit.objectives.losses:UncertaintyWeighting"],
    "optimizer": ["dit.settings:OptimizerConfig"],
    "schedule": [
        f"dit.optimizer.schedules:{name}"
        for name in ("Constant", "Cosine", "Linear", "OneCycle", "WSD", "InverseSqrt", "TorchOneCycle")
    ],
    "parallel": ["dit.parallel.dims:ParallelConfig"],
    "training": ["dit.settings:TrainingConfig"],
    "checkpoint": ["dit.settings:CheckpointConfig"],
    "logging": ["dit.settings:LoggingConfig"],
    "sampling": ["dit.settings:SamplingConfig"],
}
"""The parts of a recipe, by the names of `pretrain`'s arguments, and their classes."""

HEAD = """# Settings

<!-- Written by `python -m launch.settings_page --write`; a test keeps it true. Edit the docstrings instead. -->

`key.path=value` on the command line, an attribute of the recipe in Python, a key of `config.yaml`. A part is swapped by
name or with its fields (`objective=edm`, `objective=ddpm(prediction='v')`); `--dryrun` prints what a run resolves to. A
value out of its range is refused before anything is built, with the range. So is a value other than the default that
has no effect because of other settings. Intervals above `training.num_steps` are reported by the dry run and the log.
"""
_ENTRY = re.compile(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)$")


def own_meanings(kind: type) -> dict[str, str]:
    """Return the description of each field in the `Attributes` or `Args` of a class, without its bases."""
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
    """Return the description of each field of a class, and the nearest class of its bases that has it."""
    texts: dict[str, tuple[str, type]] = {}
    for base in reversed(kind.__mro__):
        texts |= {name: (text, base) for name, text in own_meanings(base).items()}
    return texts


def _type(annotation: object) -> str:
    """Return an annotation in the syntax of the command line."""
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Union:
        return " or ".join("None" if part is type(None) else _type(part) for part in typing.get_args(annotation))
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


SHARED = 2
"""A setting that this many classes of a part have, with the same type and meaning, is described once."""


Key: TypeAlias = tuple[str, str, str]


class Row(NamedTuple):
    """A setting of a class."""

    name: str
    kind: str
    default: str
    meaning: str
    owner: type
    """The class with the description."""

    @property
    def key(self) -> Key:
        """Name, type and meaning."""
        return self.name, self.kind, self.meaning


def rows(kind: type) -> Iterator[Row]:
    """Yield the settings of a class.

    Raises:
        ValueError: a field has no description.
    """
    descriptions, types = meanings(kind), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in descriptions:
            raise ValueError(f"{kind.__name__}.{field.name} has no line under `Attributes` or `Args` of its docstring")
        default: object = field.default
        if default is dataclasses.MISSING:
            factory = field.default_factory
            default = "required" if factory is dataclasses.MISSING else factory()
        default_text = "required" if default == "required" else f"`{default}`"
        meaning, owner = descriptions[field.name]
        yield Row(field.name, _type(types[field.name]), default_text, meaning.replace("|", "\\|"), owner)


ANY_CLASS = "Shared settings"
"""Title of the table of settings that classes without a common base describe in the same words."""


def shared_rows(tables: Iterable[Sequence[Row]]) -> dict[Key, tuple[str, Row]]:
    """Return the settings that several classes share, each with the title of its table and its first row.

    Args:
        tables: settings of each class of a part.
    """
    by_key: dict[Key, list[Row]] = {}
    for row in chain.from_iterable(tables):
        by_key.setdefault(row.key, []).append(row)
    shared = {key: group for key, group in by_key.items() if len(group) >= SHARED}
    owners = {key: {row.owner for row in group} for key, group in shared.items()}
    return {
        key: (ANY_CLASS if len(owners[key]) > 1 else group[0].owner.__name__, group[0]) for key, group in shared.items()
    }


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
            summary = "Of several classes below." if title == ANY_CLASS else _summary(group[0].owner)
            header = ["| setting | type | meaning |", "| --- | --- | --- |"]
            lines = [f"| `{row.name}` | {row.kind} | {row.meaning} |" for row in group]
            blocks += [f"### {title}\n\n{summary}\n", "\n".join([*header, *lines]) + "\n"]
        for kind, table in tables.items():
            blocks.append(f"### {kind.__name__}\n\n{_summary(kind)}\n")
            defaults: dict[str, list[str]] = {}
            for row in table:
                if row.key in shared:
                    defaults.setdefault(shared[row.key][0], []).append(f"`{row.name}` ({row.default})")
            if defaults:
                lines = [f"{title}: {', '.join(items)}" for title, items in defaults.items()]
                blocks.append(f"Settings described above, with their defaults. {'. '.join(lines)}.\n")
            if rest := [row for row in table if row.key not in shared]:
                header = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
                lines = [f"| `{row.name}` | {row.kind} | {row.default} | {row.meaning} |" for row in rest]
                blocks.append("\n".join([*header, *lines]) + "\n")
    return "\n".join(blocks)


def _summary(kind: type) -> str:
    """Return the first line of a docstring."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    return write_or_print("launch.settings_page", page, PAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
