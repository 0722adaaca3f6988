"""Tests of Triton kernels in Triton's interpreter, which is on for a whole process or not at all."""

import os

import pytest

from dit.kernels.fused import ops
from dit.verify.ranks import FORKS

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]  # tests/unit/kernels/test_fused.py runs them in a process of their own
else:  # ranks of these tests need neither launchers nor data
    FORKS.set_forkserver_preload(["tests.interpreted.update_worker"])


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give blocks 32 rows instead of 128: the interpreter runs every row of a block, and few tokens fill several."""
    monkeypatch.setattr(ops, "ROWS_OF_TILES", 32)
