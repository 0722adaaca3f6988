"""Recipes, metrics, features and data preparations that other packages add to the commands.

A package registers them as entry points in its pyproject.toml, as this project does for `examples/`:

    [project.entry-points."megatron_dit.recipes"]
    mine = "my_package.recipes"
    [project.entry-points."megatron_dit.metrics"]
    beauty = "my_package.scores:BEAUTY"

Entry points are read from installed packages. Those of this project are read from the pyproject.toml next to its
packages if there is one, because a clone runs without installation.
"""

import logging
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Optional

from dit.errors import ConfigError
from dit.safe_files import read_bytes

Kind = Literal["recipes", "metrics", "features", "preparations"]
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
DISTRIBUTION = "megatron-dit"

logger = logging.getLogger(__name__)


@cache
def registered(kind: Kind) -> dict[str, str]:
    """Return the registered `package.module:attribute` of each name; this project's come first."""
    group = f"megatron_dit.{kind}"
    points = sorted(metadata.entry_points(group=group), key=lambda point: point.name)
    ours = [point for point in points if point.dist is not None and point.dist.name == DISTRIBUTION]
    clone = _of_clone()
    values = {point.name: point.value for point in ours} if clone is None else dict(clone.get(group, {}))
    for point in points:
        if point in ours:
            continue
        if values.setdefault(point.name, point.value) != point.value:
            raise ConfigError(
                f"{values[point.name]} and {point.value} are both registered as {point.name!r} of {group}; "
                "uninstall one of the two packages, or rename the entry point"
            )
    return values


def load(kind: Kind, product: dict[str, Any]) -> dict[str, Any]:
    """Return the objects of a kind by name: those of the product, and the registered ones, which are imported.

    An object that cannot be imported is left out with a warning.
    """
    objects = {}
    for name, value in registered(kind).items():
        if name in product:
            raise ConfigError(
                f"{value} is registered as {name!r} of {kind}, which is a name of {DISTRIBUTION}; rename it"
            )
        try:
            objects[name] = resolve_name(value)
        except Exception as error:  # the module is not ours and may raise anything
            warn(name, kind, error)
    return product | objects


def warn(name: str, kind: Kind, error: Exception) -> None:
    """Log that a registered name is left out."""
    logger.warning("%s of %s is left out, because it cannot be imported: %s", name, kind, error)


def own_packages() -> set[str]:
    """Return the packages that a clone registers and contains."""
    groups = _of_clone() or {}
    packages = {value.partition(".")[0] for points in groups.values() for value in points.values()}
    return {package for package in packages if (PROJECT.parent / package).is_dir()}


@cache
def _of_clone() -> Optional[dict[str, dict[str, str]]]:
    """Return the entry points of this project's pyproject.toml by group; None if there is no such file."""
    project = tomllib.loads(read_bytes(PROJECT).decode()).get("project", {}) if PROJECT.is_file() else {}
    if project.get("name") != DISTRIBUTION:  # without a clone, this is a file of another distribution in site-packages
        return None
    groups = project.get("entry-points", {})
    return {name: dict(points) for name, points in groups.items() if name.startswith("megatron_dit.")}
