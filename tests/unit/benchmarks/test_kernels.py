"""The bytes of fused operations, by hand, and the machine code of all of their kernels."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels import Traffic, counted
from benchmarks.rows import read_rows
from dit.errors import EXIT_OK

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, from the extra `dev`")
CPU = torch.device("cpu")


@needs_triton
@pytest.mark.slow
def test_bytes_of_update_and_noise_equal_those_of_their_tensors(tmp_path: Path):
    """Two parameters of 2**24 elements: 5 tensors, a factor and 9 rates read, 4.5 written. Noise: two results."""
    assert kernels.main(["--only", "AdamW", "noise", "--out", str(tmp_path / "rows")]) == EXIT_OK
    update, noise = read_rows(tmp_path / "rows")
    assert update["measured"] is noise["measured"] is None
    assert (update["read"], update["written"]) == ((2 * 5 * 4 << 24) + 4 * 10, 2 * (4 * 4 + 2) << 24)
    tokens = 8 * 8192
    assert noise["written"] == tokens * 16 * 2 * 4
    assert noise["read"] == pytest.approx(tokens * (16 * 2 + 2 * 8), rel=1e-3)  # segment and place of each token


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_every_fused_operation_reads_and_writes_and_is_compiled_without_spills(capability: int):
    from tests.support.ahead_of_time import record_launches

    cases = kernels.cases(CPU)
    assert len(cases) >= 16
    for case, call in cases.items():
        traffic = counted(call)
        assert min(traffic.read, traffic.written) > 0, case
        with record_launches() as launches:
            call()
        assert [launch.compiled(capability).spills for launch in launches] == [0], case


def test_an_operator_of_torch_is_not_counted():
    with Traffic() as traffic:
        torch.ones(3) + 1
    assert (traffic.read, traffic.written) == (0, 0)
