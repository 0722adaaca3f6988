"""The commands: train, sample, evaluate, export and import of weights.

`python -m` puts the current folder before all installed packages, so a user's folder `recipes/` would hide that of this
project. Every command imports this package, which detects it here, before imports fail.
"""

from importlib.util import find_spec
from pathlib import Path


def check_packages(names: tuple[str, ...] = ("dit", "recipes", "energon_data")) -> None:
    """Check that the other packages of this project are imported from it."""
    home = Path(__file__).resolve().parents[1]
    for name in names:
        spec = find_spec(name)
        # A folder without `__init__.py` has no origin, and hides the packages of an editable install, too.
        places = [] if spec is None else list(spec.submodule_search_locations or [str(spec.origin)])
        folders = [Path(place).resolve() for place in places[:1]]
        if folders and folders[0].parent != home:
            raise ImportError(
                f"{folders[0]} hides the package {name!r} of megatron-dit in {home}; start `megatron-dit COMMAND`, "
                "which does not look into the current folder first, or another folder, or rename yours",
                name=__name__,
            )


check_packages()
