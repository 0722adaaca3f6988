"""The modelled bandwidth of kernels, by hand from registers, shared memory and bytes, and for all fused operations."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels import CHIPS, LATENCY_S, OTHERWISE, Traffic, occupancy
from tests.integration import actions
from tests.support.ranks import Job, run_jobs

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, from the extra `dev`")
H100 = CHIPS["h100"]


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "programs"),
    [
        (32, 0, 4, 16),  # 64 warps fill a multiprocessor
        (40, 0, 4, 12),  # 65536 / (40 x 32 x 4) = 12.8
        (41, 0, 4, 10),  # registers of a warp are rounded up from 1,312 to 1,536
        (16, 0, 1, 32),  # at most 32 programs
        (32, 100 * 1024, 4, 2),  # 228 KiB, 101 KiB each
        (255, 0, 16, 0),  # does not fit
    ],
)
def test_programs_of_a_multiprocessor_are_those_of_the_tightest_limit(registers, shared_bytes, warps, programs):
    assert occupancy(registers, shared_bytes, warps, H100) == programs


def run(folder: Path, *arguments: str) -> dict:
    job = Job(actions.command, {"main": kernels.main, "arguments": ["--json", *arguments]})
    return json.loads(run_jobs(folder, {"table": job})["table"].out.splitlines()[-1])


def check(found: dict, device: str) -> None:
    chip = CHIPS[device]
    assert {row["case"] for row in found["kernels"]} == {call["case"] for call in found["calls"]}
    for call in found["calls"]:
        rows = [row for row in found["kernels"] if row["case"] == call["case"]]
        assert call["measured"] is None
        assert call["modelled"] == min(row["modelled"] for row in rows)
        for row in rows:
            assert row["spills"] == 0
            assert 0 < row["modelled"] <= chip.bandwidth
            both = (call["read"] + call["written"]) / call["read"]
            assert row["modelled"] <= row["in_flight"] / LATENCY_S * both


@needs_triton
@pytest.mark.slow
def test_bytes_of_update_and_noise_equal_those_of_their_tensors(tmp_path):
    """Two parameters of 2**24 elements: 5 tensors, a factor and 9 rates read, 4.5 written. Noise: two results."""
    found = run(tmp_path, "--only", "AdamW", "noise")
    check(found, "h200")
    update, noise = found["calls"]
    assert (update["read"], update["written"]) == ((2 * 5 * 4 << 24) + 4 * 10, 2 * (4 * 4 + 2) << 24)
    tokens = 8 * 8192
    assert noise["written"] == tokens * 16 * 2 * 4
    assert noise["read"] == pytest.approx(tokens * (16 * 2 + 2 * 8), rel=1e-3)  # segment and place of each token


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("device", CHIPS)
def test_every_fused_operation_has_a_modelled_bandwidth_without_spills(tmp_path, device):
    found = run(tmp_path, "--device", device)
    check(found, device)
    assert len(found["calls"]) >= 16


def test_an_operator_of_torch_is_not_counted():
    with Traffic() as traffic:
        torch.ones(3) + 1
    assert (traffic.read, traffic.written) == (0, 0)


def test_the_present_device_is_modelled_unless_another_is_requested(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "describe", lambda: "NVIDIA B200")
    monkeypatch.setattr(kernels, "cases", lambda *_: {})
    assert kernels.main([]) == 0
    assert kernels.main(["--device", "h100"]) == 0
    monkeypatch.setattr(kernels, "describe", lambda: "CPU")
    assert kernels.main([]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("modelled for")]
    assert [line.split()[2] for line in lines] == ["b200", "h100", OTHERWISE]
