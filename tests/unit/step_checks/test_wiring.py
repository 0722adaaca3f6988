"""Checks before the first step that need only one rank."""

import re
from dataclasses import replace

import pytest
import torch

from benchmarks.parallel_training import tiny_model
from dit.monitoring.run_log import RunLog
from dit.step_checks.wiring import FirstSteps
from tests.support.batches import DENSE, pack


def test_latents_of_another_scale_are_reported(one_rank_world, monkeypatch):
    """For example pixels from 0 to 255; padding does not count."""
    lines: list[str] = []
    log = RunLog()
    monkeypatch.setattr(log, "message", lines.append)
    checks = FirstSteps([], one_rank_world)
    batch = pack(DENSE, tiny_model(), multiple_of=32)
    real_T1 = batch.layout.valid_T[:, None]
    latents_TC = torch.randn(batch.latents_TC.shape, generator=torch.Generator().manual_seed(0))
    checks.check_inputs(replace(batch, latents_TC=latents_TC.where(real_T1, 1e3)), 1, log)
    assert lines == []
    checks.check_inputs(replace(batch, latents_TC=100 * latents_TC), 1, log)
    (line,) = lines
    std = float(re.search(r"the latents have a standard deviation of (\S+),", line)[1])
    assert std == pytest.approx(100, rel=0.2)
    assert "scale pixels to [-1, 1]" in line
