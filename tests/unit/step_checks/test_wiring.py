"""Checks before the first step that one rank can make."""

from dataclasses import replace

from benchmarks.parallel_training import tiny_model
from dit.monitoring.run_log import RunLog
from dit.step_checks.wiring import FirstSteps
from tests.support.batches import DENSE, pack


def test_latents_of_another_scale_are_reported(one_rank_world, monkeypatch):
    """Such as pixels from 0 to 255; padding does not count."""
    lines: list[str] = []
    log = RunLog()
    monkeypatch.setattr(log, "message", lines.append)
    checks = FirstSteps([], one_rank_world)
    batch = pack(DENSE, tiny_model(), multiple_of=32)
    checks.check_inputs(batch, 1, log)
    assert lines == []
    checks.check_inputs(replace(batch, latents_TC=100 * batch.latents_TC), 1, log)
    (line,) = lines
    assert "the latents have a standard deviation of 1" in line
    assert "scale pixels to [-1, 1]" in line
