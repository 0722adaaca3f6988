"""A small data set of letters, a copy of a folder to damage, and one tracing process for many plans."""

import shutil
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="module")
def one_tracer() -> Iterator[None]:
    """Trace all plans of a module in one process, which keeps the results of operations."""
    from dit.planner.trace import Tracer

    with Tracer() as tracer, pytest.MonkeyPatch.context() as patch:
        patch.setattr("dit.planner.plan.trace", tracer)
        yield


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copy a data set so that a test may damage it."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "copy"))

    return copy
