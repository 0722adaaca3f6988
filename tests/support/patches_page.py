"""Generator of docs/patches.md: every patch of another library, and every private name that the sources use.

`python -m tests.support.patches_page --write` writes the page; without `--write` it is printed.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Optional

from tests.support.generated_page import write_or_print

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "patches.md"
PACKAGES = ("dit", "energon_data", "launch", "recipes")
LIBRARIES = ("megatron", "nemo_run", "torch")

HEAD = """# Patches of other libraries

<!-- Written by `python -m tests.support.patches_page --write`; a test keeps it true. Edit the decorators instead. -->

Files that replace, override or use private parts of other libraries. The decorator
[`patches`](../dit/patches.py) of the function has the reason, and refuses versions that it was not written for. To
upgrade a library, compare each part with the new version, extend the versions in the decorator, and widen the bound in
`pyproject.toml`.
"""
PRIVATE = """## Private names

Names with a leading underscore that are used but not replaced:
"""


class Patch(NamedTuple):
    """One use of the decorator `patches`."""

    file: Path
    function: str
    library: str
    part: str
    link: str


@cache
def sources() -> dict[Path, ast.Module]:
    """Return the syntax tree of every file of the packages, by path in the repository."""
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in files}


def patches_of(file: Path, tree: ast.Module) -> Iterator[Patch]:
    """Yield the patches that a file declares."""
    for node in ast.walk(tree):
        for call in getattr(node, "decorator_list", ()):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "patches":
                library, part = (ast.literal_eval(argument) for argument in call.args)
                words = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
                yield Patch(file, getattr(node, "name", ""), library, part, words.get("link", ""))


def bindings(tree: ast.Module) -> dict[str, str]:
    """Return the dotted name of each name that a file imports from one of the libraries."""
    dotted_names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [
                (a.asname or a.name.partition(".")[0], a.name if a.asname else a.name.partition(".")[0])
                for a in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            names = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            continue
        dotted_names |= {name: dotted for name, dotted in names if dotted.partition(".")[0] in LIBRARIES}
    return dotted_names


def dotted_name(node: ast.AST, names: dict[str, str]) -> Optional[str]:
    """Return the dotted name of `a.b.c` if `a` is imported from one of the libraries."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value, names)):
        return f"{owner}.{node.attr}"
    return None


def is_private(dotted: str) -> bool:
    """Return whether a part of the name is private; `torch._foreach_*` have public documentation."""
    return any(part.startswith("_") and not part.startswith(("__", "_foreach_")) for part in dotted.split("."))


def private_names(tree: ast.Module) -> set[str]:
    """Return the private names of the libraries that a file uses, without names that are prefixes of others."""
    names = bindings(tree)
    used = {dotted_name(node, names) for node in ast.walk(tree)}
    private = {name for name in (*used, *names.values()) if name is not None and is_private(name)}
    return {name for name in private if not any(other.startswith(f"{name}.") for other in private)}


def page() -> str:
    """Return docs/patches.md."""
    trees = sources()
    patches = [patch for file, tree in trees.items() for patch in patches_of(file, tree)]
    blocks = [HEAD]
    for library in sorted({patch.library for patch in patches}):
        rows = [f"## {library}\n"]
        for file, group in groupby((patch for patch in patches if patch.library == library), attrgetter("file")):
            parts = [f"`{patch.part}`" + (f" ([upstream]({patch.link}))" if patch.link else "") for patch in group]
            rows.append(f"* [{file}](../{file}): {'; '.join(parts)}")
        blocks.append("\n".join(rows) + "\n")
    names = sorted(set().union(*map(private_names, trees.values())))
    return "\n".join([*blocks, PRIVATE, f"{', '.join(f'`{name}`' for name in names)}."]) + "\n"


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    return write_or_print("tests.support.patches_page", page, PAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
