"""The clone that the tests belong to, and the outputs of commands in it."""

from itertools import chain
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def outputs(folder: Path) -> set[str]:
    """Return the names of data sets, runs and pictures in a folder."""
    patterns = ("data/*", "runs/*", "wandb/*", "*.png", "*.gif")
    return {str(path.relative_to(folder)) for path in chain.from_iterable(map(folder.glob, patterns))}
