"""Errors of a prediction against their formulas."""

import math

import pytest
import torch

from dit.errors import ConfigError
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.losses import SMALLEST_NORM, pointwise_error
from tests.unit.objectives.packs import noise_for, pack


def test_pointwise_errors_equal_their_formulas():
    """d**2, |d|, and the smooth l1: half of d**2 up to 1, |d| - 1 / 2 beyond."""
    difference = torch.tensor([-3.0, -1.0, -0.25, 0.0, 0.5, 1.0, 2.0])
    formulas = {
        "l2": difference**2,
        "l1": difference.abs(),
        "huber": torch.where(difference.abs() <= 1, difference**2 / 2, difference.abs() - 0.5),
    }
    target = torch.linspace(-1, 1, 7)
    for kind, expected in formulas.items():
        torch.testing.assert_close(pointwise_error(target + difference, target, kind), expected)


def test_l2_cosine_adds_one_minus_the_cosine_of_each_token():
    """Padding adds nothing, and has no gradient although it holds NaN; a prediction of zeros has small gradients."""
    batch, objective = pack([5, 3], multiple_of=6), FlowMatching(loss_kind="l2_cosine")
    prepared = objective.prepare(batch, noise_for(batch))
    valid_T = batch.layout.valid_T
    guess_TC = torch.where(valid_T[:, None], torch.sin(3 * prepared.inputs_TC), math.nan).requires_grad_()
    total, count, _ = objective.loss(guess_TC, prepared, batch.layout)
    expected = 0.0
    for prediction, target in zip(guess_TC[valid_T].tolist(), prepared.target_TC[valid_T].tolist()):
        cosine = sum(p * t for p, t in zip(prediction, target)) / math.hypot(*prediction) / math.hypot(*target)
        expected += math.dist(prediction, target) ** 2 / len(target) + 1 - cosine
    assert (total.item(), count) == (pytest.approx(expected, rel=1e-5), 8)
    total.backward()
    assert guess_TC.grad.isfinite().all()
    assert not guess_TC.grad[~valid_T].any()
    zeros_TC = torch.zeros_like(guess_TC).requires_grad_()
    objective.loss(zeros_TC, prepared, batch.layout)[0].backward()
    assert zeros_TC.grad.norm(dim=1).max() < 2 / SMALLEST_NORM


def test_l2_cosine_compares_velocities():
    with pytest.raises(ConfigError, match="l2_cosine compares velocities"):
        FlowMatching(loss_kind="l2_cosine", prediction="x0")
