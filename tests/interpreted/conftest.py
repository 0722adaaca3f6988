"""Tests of Triton kernels in Triton's interpreter, which a process enables for all kernels or for none."""

import os

import pytest

from dit.kernels.fused import blocks
from dit.verify.ranks import FORKS

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]  # tests/unit/kernels/test_fused.py runs them in a separate process
else:
    FORKS.set_forkserver_preload(["tests.interpreted.update_worker"])  # no launcher and no data
    from dit.kernels.fused.gpu import adamw, gradients

    for kernel in (adamw, gradients):
        kernel.CHUNK = 2 * kernel.BLOCK  # not 16 or 32 blocks, because the interpreter is slow


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of 32 rows instead of 128: the interpreter runs every row, and a few tokens fill several blocks."""
    monkeypatch.setattr(blocks, "ROWS_OF_TILES", 32)
