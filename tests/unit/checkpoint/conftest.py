"""Two checkpoints, written once, and a temporary folder in memory, because a flush to a disk takes milliseconds."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.unit.checkpoint.checkpoints import make_store, save

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """Write two checkpoints; a test that changes them takes a copy."""
    store = make_store(tmp_path_factory.mktemp("two") / "checkpoints", keep_last=2)
    save(store, 10)
    save(store, 20)
    return store.root


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in memory, or on disk where none is in memory."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def server():
    from tests.support.object_store import object_store  # importing it takes a second

    with object_store() as running:
        yield running


@pytest.fixture
def bucket(server):
    yield server
    server.clear()
