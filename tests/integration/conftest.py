"""Small data set of real letters, rendered once per session with fonts that every installation has."""

from pathlib import Path

import matplotlib
import pytest

from examples.letters.stills import prepare_letters


@pytest.fixture(scope="session")
def letters_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """338 training and 208 held-out pictures of 8 x 8 pixels, in shards of 100."""
    out = tmp_path_factory.mktemp("letters") / "letters"
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return prepare_letters(out, fonts=[fonts], size=8, variations=1, samples_per_shard=100).folder
