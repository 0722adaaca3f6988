"""Small real data sets, made once."""

from pathlib import Path

import pytest
from small_data import clips, pictures, write_dataset

from energon_data.dataset import EnergonData


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in this process by default, because worker processes take time to start."""
    monkeypatch.setitem(EnergonData.__init__.__kwdefaults__, "background", False)


@pytest.fixture(scope="session")
def mixed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """75 images and clips of three shapes in five shards, and 21 held-out ones."""
    sizes = [(1, 4, 4), (2, 4, 4), (1, 6, 8)]
    splits = {"train": clips(75, sizes=sizes), "val": clips(21, sizes=sizes, seed=1)}
    return write_dataset(tmp_path_factory.mktemp("mixed") / "data", splits)


@pytest.fixture(scope="session")
def picture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pictures of three sizes in four shards, and 9 held-out ones."""
    sizes = [(12, 12), (10, 16), (20, 12)]
    splits = {"train": pictures(60, sizes=sizes), "val": pictures(9, sizes=sizes, seed=1)}
    return write_dataset(tmp_path_factory.mktemp("pictures") / "data", splits)
