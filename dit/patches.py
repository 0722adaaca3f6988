"""Declaration and version check of patches: code that replaces, overrides or uses private parts of another library.

docs/patches.md lists all patches. To upgrade a library, review each of its patches against the new version, extend the
versions in the decorator, and widen the bound in pyproject.toml.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Optional, ParamSpec, TypeVar

from dit.errors import ConfigError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def patches(
    library: str, part: str, *, why: str, link: str = ""
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Declare that a function is a patch, and check the installed version of the library when it is called.

    Args:
        library: package and the minor versions that the patch was written for, `torch 2.11-2.14` or `nemo-run 0.11`.
        part: upstream module and name that the function replaces, overrides or uses.

    Raises:
        ConfigError: (by the decorated function) another version is installed.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            check_version(library, part)
            return function(*args, **kwargs)

        return checked

    return decorate


@contextmanager
def replaced(owner: object, **attributes: object) -> Iterator[None]:
    """Replace attributes of a module, a class or an object inside this context."""
    originals = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


@functools.cache  # reading it takes 2 ms
def installed_version(package: str) -> Optional[str]:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def check_version(library: str, part: str) -> None:
    """Check that the installed version of a library is one that a patch was written for."""
    package, first, last = versions_of(library)
    installed = installed_version(package) or "no version"
    number = re.match(r"(\d+)\.(\d+)", installed)
    if number is None or not first <= (int(number[1]), int(number[2])) <= last:
        raise ConfigError(
            f"{package}: {installed} is installed, but the patch of {part} was written for {library}; "
            f"pip install '{package}>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}', or "
            "review the patch (docs/patches.md)"
        )


def versions_of(library: str) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """Return the package, and the first and last minor version, of the first argument of `patches`."""
    package, versions = library.split()
    first, _, last = versions.partition("-")
    return package, _minor(first), _minor(last or first)


def _minor(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
