"""Two checkpoints, written once; a test that changes them takes a copy."""

import pytest

from tests.unit.checkpoint.checkpoints import make_store, save


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("two") / "checkpoints", keep_last=2)
    save(store, 10)
    save(store, 20)
    return store.root
