"""A small data set of letters, and a copy of a folder to damage."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from examples.letters.stills import LettersReport


@pytest.fixture(scope="session")
def bundled_fonts() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory, bundled_fonts: Path) -> "LettersReport":
    """A small letters data set from the fonts that every installation has."""
    from examples.letters.stills import prepare_letters

    out = tmp_path_factory.mktemp("letters") / "letters"
    return prepare_letters(out, fonts=[bundled_fonts], variations=2, samples_per_shard=200)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copy a data set so that a test may damage it."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "copy"))

    return copy
