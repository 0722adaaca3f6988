"""Recipes and components by name, read from the source files without importing them.

`launch.train --list` must answer at once, and importing a recipe takes seconds (torch, Megatron-Core, nemo-run). So the
names and one-line descriptions are taken from the syntax tree (`read_entries`). The files are those of this package and
the modules that are registered as entry points (`dit.extensions`).
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from dit import extensions
from dit.command_line import did_you_mean
from dit.errors import ConfigError

PACKAGE = "recipes"
FOLDER = Path(__file__).parent
TRAINING_FUNCTION = "pretrain"
REGISTERED = "Examples, and recipes of installed packages"
TINY = "Seconds on synthetic data"
PUBLISHED = "Published and larger models"
MEASURING = "Measuring systems"
_MEASURING = r"(?:bench|matrix|stage|mock|train_mock).*|.*_mock.*"
SECTIONS = {
    "Start here": r"tiny_dit|own_data",
    REGISTERED: r"(?!)",  # by package, not by name
    "Your own data and open weights": r"own_.*|finetune.*|dreambooth",
    TINY: r"tiny_.*",
    PUBLISHED: rf"(?!{_MEASURING}).*",
    MEASURING: _MEASURING,
}
"""The sections of the page and the list, by patterns of recipe names; the first match counts."""
_SKIPPED_FILES = {"__init__.py", "registry.py"}


@dataclass(frozen=True)
class Entry:
    """One nemo-run factory.

    Attributes:
        name: name on the command line.
        module: importable module that defines it.
        function: name of the function in that module.
        target: registered target: the training function for a recipe, a type for a component.
        docstring: its docstring, dedented.
    """

    name: str
    module: str
    function: str
    target: str
    docstring: str

    @property
    def line(self) -> str:
        return self.docstring.partition("\n")[0].strip()

    @property
    def is_recipe(self) -> bool:
        return self.target == TRAINING_FUNCTION

    @property
    def is_registered(self) -> bool:
        """Whether it is defined outside this package."""
        return self.module.partition(".")[0] != PACKAGE

    @property
    def file(self) -> str:
        """The path of its file, from the folder that has its package."""
        return f"{self.module.replace('.', '/')}.py"

    @property
    def section(self) -> str:
        if self.is_registered and not re.fullmatch(_MEASURING, self.name):
            return REGISTERED
        return next(title for title, names in SECTIONS.items() if re.fullmatch(names, self.name))


def read_entries(file: Path, module: str) -> list[Entry]:
    """Return the factories that the file of a module defines, in its order.

    They are functions under `@run.cli.factory(...)` or `@registered`, and assignments of `part`, `named_recipe` or
    `variant`, each with a string after it; see `recipes.base`.
    """
    factories, helpers = [], dict.fromkeys(("named_recipe", "variant"), TRAINING_FUNCTION)
    body = ast.parse(file.read_text(encoding="utf-8"), str(file)).body
    for node, following in zip(body, [*body[1:], ast.Pass()]):
        match node:
            case ast.FunctionDef(name=function, decorator_list=decorators):
                for decorator in decorators:
                    words = {"target": TRAINING_FUNCTION} if ast.unparse(decorator) == "registered" else {}
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "run.cli.factory":
                        words = {str(k.arg): ast.unparse(k.value).strip("'") for k in decorator.keywords}
                    if "target" in words:
                        name, docstring = words.get("name", function), ast.get_docstring(node) or ""
                        factories.append(Entry(name, module, function, words["target"], docstring))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=helper), args=[first, *rest])):
                if helper == "partial" and ast.unparse(first) == "part":
                    helpers[name] = ast.unparse(rest[0])
                elif helper == "part" or helper in helpers:
                    docstring = ast.get_docstring(ast.Module([following], [])) or ""
                    public = next(x.value for x in (first, *rest) if isinstance(x, ast.Constant))
                    target = helpers.get(helper) or ast.unparse(first)
                    factories.append(Entry(str(public), module, name, target, docstring))
    return factories


def _entries_by_file() -> Iterator[list[Entry]]:
    """Yield the factories of each recipe file: those of this package, then those of registered modules."""
    for file in sorted(FOLDER.glob("*.py")):
        if file.name not in _SKIPPED_FILES:
            yield read_entries(file, f"{PACKAGE}.{file.stem}")
    for name, module in extensions.registered("recipes").items():
        try:
            spec = find_spec(module)
            if spec is None or spec.origin is None:
                raise ModuleNotFoundError(f"No module named {module!r}")
            factories = read_entries(Path(spec.origin), module)
        except Exception as error:  # the module is not ours and may raise anything
            extensions.warn(name, "recipes", error)
        else:
            yield factories


@cache
def entries() -> tuple[Entry, ...]:
    """Return every factory of this package and of registered modules, by file and position."""
    by_name: dict[str, Entry] = {}
    for entry in chain.from_iterable(_entries_by_file()):
        if entry.name in by_name:
            raise ConfigError(
                f"{by_name[entry.name].module} and {entry.module} both define {entry.name}; rename one of the two"
            )
        by_name[entry.name] = entry
    return tuple(by_name.values())


def recipes() -> list[Entry]:
    """Return the recipes that `--factory` accepts."""
    return [e for e in entries() if e.is_recipe]


def components() -> list[Entry]:
    """Return the named parts that an override such as `objective=edm` accepts."""
    return [e for e in entries() if not e.is_recipe]


def sections(group: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return recipes by section, without empty sections."""
    by_title = {title: [entry for entry in group if entry.section == title] for title in SECTIONS}
    return {title: members for title, members in by_title.items() if members}


def listing() -> str:
    """Return every recipe with its line, as plain text for the console."""
    width = max(len(e.name) for e in recipes())
    blocks = [
        "\n".join([title, *(f"  {e.name:<{width}}  {e.line}" for e in group)])
        for title, group in sections(recipes()).items()
    ]
    return "\n\n".join(blocks)


def description(name: str) -> str:
    """Return the docstring of a recipe or component and the file that defines it."""
    by_name = {entry.name: entry for entry in entries()}
    if name not in by_name:
        hint = did_you_mean(name, by_name) or "; --list shows the recipes"
        raise ConfigError(f"--describe {name}: no such recipe or component{hint}")
    entry = by_name[name]
    return f"{entry.name} ({entry.file})\n\n{entry.docstring}"
