"""Reads data without worker processes."""

import pytest

from energon_data.dataset import EnergonData


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EnergonData.__init__.__kwdefaults__, "background", False)
