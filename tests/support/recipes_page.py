"""Generator of recipes/README.md, which lists every recipe and component, from their docstrings.

`python -m tests.support.recipes_page --write` writes the page; without `--write` it is printed.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from recipes import registry
from recipes.registry import Entry
from tests.support.generated_page import write_or_print

README = registry.FOLDER / "README.md"
SUMMARIES = {
    registry.REGISTERED: "The [page of the examples](../examples/README.md) describes their data and metrics.",
    registry.TINY: "A small form of every backbone; suffixes name layouts:",
}
"""Sections of the page with a sentence instead of the recipes' descriptions."""
SIZE = re.compile(r"\(([\d.]+ [MB])")
PUBLISHED_MODELS = re.compile("finetune_(?!lora)")
"""Recipes that docs/fine-tuning.md describes."""


def _link(entry: Entry) -> str:
    """Return the link from the page to the file of a recipe."""
    return f"../{entry.file}" if entry.is_registered else Path(entry.file).name


def _names_by(group: Sequence[Entry], key: Callable[[Entry], str]) -> list[str]:
    """Return a line of names for each value of a key, in order of first appearance."""
    names: dict[str, list[str]] = {}
    for entry in group:
        names.setdefault(key(entry), []).append(f"`{entry.name}`")
    return [f"* {value}: {', '.join(row)}" for value, row in names.items()]


def _by_file(group: Sequence[Entry]) -> Iterator[str]:
    """Yield a line for each file: first line of its docstring, and recipes; equal neighbours share a bracket."""
    for file, grouped in groupby(group, attrgetter("file")):
        entries = list(grouped)
        docstring = ast.get_docstring(ast.parse((registry.FOLDER.parent / file).read_text(encoding="utf-8")))
        assert docstring is not None
        sizes = groupby(entries, lambda entry: "".join(SIZE.findall(entry.line)))
        cells = (", ".join(f"`{entry.name}`" for entry in equal) + f" ({size})" * bool(size) for size, equal in sizes)
        yield f"* [{docstring.splitlines()[0].removesuffix('.')}]({_link(entries[0])}): {', '.join(cells)}."


def page() -> str:
    """Return the text of `recipes/README.md`."""
    lines = [
        "# Recipes",
        "",
        "<!-- Written by `python -m tests.support.recipes_page --write`. Edit the docstrings instead. -->",
        "",
        "Recipes that `python -m launch.train --yes --factory NAME` starts, and the parts that an override can name. A",
        "number in brackets is the parameter count of each recipe since the previous brackets. `--list` adds the",
        "hardware, and recipes to measure systems; `--describe NAME` prints a full description. [Matching",
        "encoders](../energon_data/README.md#folders-of-the-recipes).",
    ]
    in_repository = [entry for entry in registry.recipes() if (registry.FOLDER.parent / entry.file).is_file()]
    sections = registry.sections(in_repository)
    for title, group in ((title, group) for title, group in sections.items() if title != registry.MEASURING):
        lines += ["", f"## {title}", ""]
        if title == registry.PUBLISHED:
            lines += _by_file(group)
        elif title in SUMMARIES:
            names = ", ".join(f"`{entry.name}`" for entry in group) + "."
            lines += [SUMMARIES[title], *([names] if title == registry.TINY else [])]
            lines += ["", *_by_file(group)] if title == registry.REGISTERED else []
        else:
            described = [entry for entry in group if not PUBLISHED_MODELS.match(entry.name)]
            lines += [f"* [`{entry.name}`]({_link(entry)}): {entry.line}" for entry in described]
            if names := ", ".join(f"`{entry.name}`" for entry in group if PUBLISHED_MODELS.match(entry.name)):
                lines.append(f"* Published models ([memory and time](../docs/fine-tuning.md#memory)): {names}.")
    lines += ["", "## Components", "", "Named parts for overrides: `objective=edm objective.p_mean=-0.4`.", ""]
    lines += _names_by(registry.components(), lambda e: e.target)
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or update the file."""
    return write_or_print("tests.support.recipes_page", page, README, argv)


if __name__ == "__main__":
    sys.exit(main())
