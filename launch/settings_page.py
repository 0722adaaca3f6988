"""docs/settings.md: every setting of every part, generated from the dataclasses.

`python -m launch.settings_page --write` writes the page; without `--write` it is printed.
"""

import argparse
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Optional, get_type_hints

from dit.errors import EXIT_OK
from dit.models.registry import BACKBONES
from dit.objectives import OBJECTIVES
from dit.terminal import echo

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
PARTS = {
    "model": [entry.config for entry in BACKBONES.values()],
    "model.lora": ["dit.models.lora_config:LoRAConfig"],
    "data": ["energon_data.dataset:EnergonData", "energon_data.mock:MockData"],
    "objective": list(OBJECTIVES.values()),
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


def meanings(kind: type) -> dict[str, str]:
    """Return the description of each field in the `Attributes` or `Args` of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        lines = inspect.cleandoc(base.__doc__ or "").splitlines()
        inside, names = False, list[str]()
        for line in lines:
            if not line.startswith(" "):
                inside, names = line in ("Attributes:", "Args:") or (inside and not line), []
                continue
            entry = _ENTRY.match(line.strip()) if inside and re.match(r" {4}\S", line) else None
            if entry:
                names = entry[1].split(", ")
                found.update(dict.fromkeys(names, entry[2]))
            else:
                found.update({name: f"{found[name]} {line.strip()}" for name in names})
    return found


def _type(annotation: object) -> str:
    """Return an annotation in the syntax of the command line."""
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Union:
        return " or ".join("None" if part is type(None) else _type(part) for part in typing.get_args(annotation))
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def rows(kind: type) -> Iterator[str]:
    """Yield the table of a class.

    Raises:
        ValueError: a field has no description.
    """
    said, types = meanings(kind), get_type_hints(kind)
    yield "| setting | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for field in dataclasses.fields(kind):
        if field.name not in said:
            raise ValueError(f"{kind.__name__}.{field.name} has no line under `Attributes` or `Args` of its docstring")
        default: object = field.default
        if default is dataclasses.MISSING:
            factory = field.default_factory
            default = "required" if factory is dataclasses.MISSING else factory()
        shown = "required" if default == "required" else f"`{default}`"
        meaning = said[field.name].replace("|", "\\|")
        yield f"| `{field.name}` | {_type(types[field.name])} | {shown} | {meaning} |"


def page() -> str:
    """Return docs/settings.md."""
    blocks = [HEAD]
    for part, paths in PARTS.items():
        blocks.append(f"## {part}\n")
        for path in paths:
            module, _, name = path.partition(":")
            kind = getattr(import_module(module), name)
            summary = inspect.cleandoc(kind.__doc__).partition("\n")[0]
            blocks.append(f"### {name}\n\n{summary}\n\n" + "\n".join(rows(kind)) + "\n")
    return "\n".join(blocks)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m launch.settings_page", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew docs/settings.md")
    args = parser.parse_args(argv)
    text = page()
    if args.write:
        PAGE.write_text(text)
    else:
        echo(text)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
