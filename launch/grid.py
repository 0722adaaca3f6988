"""Grids of runs: recipes x layouts x variants, for `launch.experiment` and `benchmarks.sweep`.

A layout is written like in names of recipes, `tp2sp_cp4`, `fsdp`, `tp2+pp2`; `own` is that of the recipe. Other sizes
are 1, independent of the recipe.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product

from dit.errors import ConfigError
from launch.argument_types import split_arguments

OWN = "own"
LONGEST_NAME = 150
"""Bytes of the name of a run; a file system allows 255 for a file, and other programs add to the name."""
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
SWITCHES: dict[str, dict[str, int | bool | str]] = {
    "sp": {"sequence_parallel": True},
    "ddp": {"data_parallel": "ddp"},
    "distopt": {"data_parallel": "distributed_optimizer"},
    "fsdp": {"data_parallel": "fsdp"},
}
"""Words of a layout without a number."""
_WORDS = re.compile(rf"(?P<size>{'|'.join(SIZES)})(?P<number>[1-9]\d*)|{'|'.join(SWITCHES)}|[_+]")


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    recipe: str
    layout: str
    variant: str
    common: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """All overrides; later ones take precedence."""
        return [*self.common, *layout_overrides(self.layout), *split_arguments(self.variant, " \t\n")]

    @property
    def name(self) -> str:
        """A name for a folder or a job, unique in the grid."""
        return file_name(".".join(filter(None, (self.recipe, self.layout, self.variant))))


def file_name(text: str) -> str:
    """Return a file name: no character has a meaning for a shell, and the end of a long name is a digest of it."""
    name = re.sub(r"[^\w.=-]+", "_", text)
    encoded = name.encode()
    if len(encoded) <= LONGEST_NAME:
        return name
    return f"{encoded[: LONGEST_NAME - 9].decode(errors='ignore')}-{sha256(encoded).hexdigest()[:8]}"


def layout_overrides(text: str) -> list[str]:
    """Return the overrides of a layout: `tp2sp`, `cp4`, `pp2_fsdp`, or `own` for none."""
    if text == OWN:
        return []
    defaults = {**dict.fromkeys(SIZES.values(), 1), "sequence_parallel": False}
    settings, remainder = dict[str, int | bool | str](), text
    while remainder:
        match, setting = _WORDS.match(remainder), dict[str, int | bool | str]()
        if match and match["size"]:
            setting = {SIZES[match["size"]]: int(match["number"])}
        elif match:
            setting = SWITCHES.get(match[0], {})  # a separator has none
        if match is None or setting.keys() & settings.keys():
            raise ConfigError(
                f"layout {text!r}: {remainder!r} is unknown or repeated; write sizes as {', '.join(SIZES)} with "
                f"a number, then {', '.join(SWITCHES)}, such as tp2sp_cp4 or fsdp, or {OWN}"
            )
        settings |= setting
        remainder = remainder[match.end() :]
    return [f"parallel.{key}={value}" for key, value in {**defaults, **settings}.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a grid to a command."""
    flag = parser.add_argument
    flag("--factory", required=True, nargs="+", metavar="RECIPE", help="recipes (launch.train --list)")
    flag("--layouts", nargs="+", default=[OWN], metavar="LAYOUT", help="such as tp2sp_cp4, pp2, fsdp (%(default)s)")
    flag("--vary", action="append", metavar="'key=value ...'", help="overrides of a variant; repeat for several")
    flag("overrides", nargs="*", metavar="key=value", help="of every run")


def overrides_of(args: argparse.Namespace) -> list[str]:
    """Return the overrides of every run, including those that follow a list of recipes or layouts."""
    return [*args.overrides, *filter(_is_override, (*args.factory, *args.layouts))]


def _is_override(word: str) -> bool:
    return "=" in word.partition("(")[0]


def cells_of(args: argparse.Namespace, common: Sequence[str], reserved: Sequence[str] = ()) -> list[Cell]:
    """Return the cells of a parsed command, recipe by recipe."""
    from launch import cli

    recipes, layouts = ([word for word in words if not _is_override(word)] for words in (args.factory, args.layouts))
    for recipe in recipes:
        cli.check_factory(recipe)
    grid = product(recipes, layouts or [OWN], args.vary or [""])
    cells = [Cell(recipe, layout, variant, tuple(common)) for recipe, layout, variant in grid]
    names = [cell.name for cell in cells]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the grid has {', '.join(repeated)} twice; name each recipe, layout and variant once")
    for cell in cells:
        for word in cell.overrides:
            key, equals, _ = word.partition("=")
            if not equals or key in reserved:
                reason = "is set by the command for each run" if equals else "is not key=value"
                raise ConfigError(f"override {word!r} {reason}; leave it out")
    return cells
