"""The loss scale on one rank: its settings, and scaled compared with unscaled gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from dit.errors import ConfigError
from dit.parallel.build import build_model, build_optimizer, wrap
from dit.parallel.dims import ParallelConfig
from dit.parallel.loss_scale import TRACKERS, LossScale, loss_scale_of
from dit.settings import OptimizerConfig, TrainingConfig
from dit.verify.trial import Recorder
from tests.laws.backbones import config_of


def optimizer_of(one_rank_world, **training):
    config, parallel, settings = config_of("dit"), ParallelConfig(data_parallel="ddp"), TrainingConfig(**training)
    chunks = build_model(config, parallel, settings, one_rank_world)
    return build_optimizer(
        wrap(chunks, parallel, one_rank_world), OptimizerConfig(), parallel, settings, one_rank_world
    )


def settle(scale, overflowed, *, is_finite=True):
    """Adapt a scale to a step, as a step does."""
    value = scale.adapt(torch.tensor(overflowed), torch.tensor(is_finite))
    scale.settle(value.item(), overflowed=overflowed and is_finite)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss_scale": 8.0, "precision": "bf16"}, "loss_scale=8.0 has no effect with training.precision=bf16"),
        ({"initial_loss_scale": 2.0**40}, "initial_loss_scale"),
        ({"loss_scale_window": 0}, "loss_scale_window"),
    ],
)
def test_wrong_settings_are_named(settings, says):
    with pytest.raises(ConfigError, match=says):
        TrainingConfig(**{"precision": "fp16", **settings}).validate()


def test_every_setting_reaches_the_scale(one_rank_world):
    """The scale halves on an overflow, down to 1, and doubles after the window."""
    optimizer = optimizer_of(one_rank_world, precision="fp16", initial_loss_scale=4.0, loss_scale_window=3)
    scale, found = loss_scale_of(optimizer), []
    for overflow in (True, True, True, False, False, False, False, False, True, False):
        settle(scale, overflow)
        found.append((scale.value, scale.shrank))
    values = [2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0]
    shrank = [True, True, False, False, False, False, False, False, True, False]
    assert found == list(zip(values, shrank))
    assert scale.overflowed_steps == 4


@pytest.mark.parametrize(("hysteresis", "window"), [(1, 1), (1, 3), (2, 2), (3, 5)])
def test_the_scale_on_the_device_is_that_of_megatron_core(one_rank_world, hysteresis, window):
    """After any overflows, also if the state moves to another object in between."""
    arguments = {"initial_scale": 12.7, "min_scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    generator = torch.Generator().manual_seed(window)
    megatron, *scalers = (
        DynamicGradScaler(**arguments, growth_interval=window, hysteresis=hysteresis) for _ in range(3)
    )
    scales = [LossScale(scaler, 1) for scaler in scalers]
    for number in range(200):
        overflowed = bool(torch.rand((), generator=generator) < 0.3)
        settle(scales[0], overflowed)
        megatron.update(overflowed)
        assert torch.equal(scales[0].scale, megatron.scale)
        state = megatron.state_dict()
        assert [scales[0].scalars()[name] for name in TRACKERS] == [state[name] for name in TRACKERS]
        if number % 7 == 0:
            scales.reverse()
            scales[0].load(scales[1].scalars())


def test_a_shorter_window_takes_effect_at_a_resume(one_rank_world):
    optimizer = optimizer_of(one_rank_world, precision="fp16", initial_loss_scale=4.0, loss_scale_window=3)
    scale = loss_scale_of(optimizer)
    scale.load(scale.scalars() | {TRACKERS[0]: 5})
    settle(scale, False)
    assert scale.value == 8.0


def test_a_trial_reports_the_loss_scale_only_for_an_overflow_of_a_finite_loss(one_rank_world):
    session: Any = SimpleNamespace(chunks=[], loss_scale=loss_scale_of(optimizer_of(one_rank_world, precision="fp16")))
    recorder = Recorder(session)
    step: Any = SimpleNamespace(number=2, overflowed=True, loss=float("nan"), grad_norm=float("inf"))
    assert recorder.judge(step) == "update"
    step.loss = 1.0
    with pytest.raises(ConfigError, match="step 2: the gradients overflow with a loss scale of"):
        recorder.judge(step)


def test_a_step_with_a_bad_loss_changes_no_state(one_rank_world):
    """The scale, the count, and the steps towards the next doubling do not change."""
    optimizer = optimizer_of(one_rank_world, precision="fp16", initial_loss_scale=8.0, loss_scale_window=3)
    scale = loss_scale_of(optimizer)
    settle(scale, False)
    before = scale.scalars()
    for overflowed in (True, False):
        scale.found_inf.fill_(overflowed)
        settle(scale, overflowed, is_finite=False)
        assert not scale.shrank
        assert scale.found_inf == 0, "the overflow is forgotten"
    assert scale.scalars() == before


def test_a_constant_scale_does_not_change(one_rank_world):
    scale = loss_scale_of(optimizer_of(one_rank_world, precision="fp16", loss_scale=24.0))
    settle(scale, True)
    assert not scale.shrank
    assert scale.value == 24.0
    scale.load({"loss_scale": 2.0, "overflowed_steps": 5, "growth_tracker": 1, "hysteresis_tracker": 1})
    assert scale.value == 24.0
    assert scale.overflowed_steps == 5


def test_the_state_is_restored(one_rank_world):
    """Also a scale that is no power of two, and the steps towards the next doubling."""
    settings = {"precision": "fp16", "initial_loss_scale": 1000.3, "loss_scale_window": 2}
    one, other = (loss_scale_of(optimizer_of(one_rank_world, **settings)) for _ in range(2))
    one.start([20, 4])
    for overflow in (True, False):
        settle(one, overflow)
    other.load(one.scalars())
    assert other.value == one.value
    for scale in (one, other):
        settle(scale, False)
    assert one.scalars() == other.scalars()
    assert other.tokens == 32
    assert one.value == float(torch.tensor(1000.3))


@pytest.mark.parametrize(("tokens", "divisor"), [(1, 1), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_the_scale_applies_to_the_mean_loss(one_rank_world, tokens, divisor):
    """Up to rounding to a power of two, which does not change the digits of a gradient."""
    scale = loss_scale_of(optimizer_of(one_rank_world, precision="fp16", initial_loss_scale=512.0))
    scale.start([tokens])
    assert scale(torch.tensor(3.0)).item() == 3.0 * 512 / divisor
    assert scale.scale.item() * scale.inv_scale.item() == 1
    assert scale.value == 512


@pytest.mark.parametrize("lengths", [[10, 6, 8, 8], [10, 6], [10]])
def test_the_first_scale_does_not_depend_on_the_samples_of_a_replica(one_rank_world, lengths):
    """Micro-batches of 4 samples, or of fewer if a global batch has fewer for each replica."""
    scale = loss_scale_of(optimizer_of(one_rank_world, precision="fp16", micro_batch_size=4))
    scale.start(lengths)
    assert scale.tokens == 64


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_have_no_loss_scale(one_rank_world, precision):
    assert loss_scale_of(optimizer_of(one_rank_world, precision=precision)) is None


def test_unscaling_is_exact(one_rank_world):
    """For a power of two S: gradients of S times the loss, divided by S, equal those of the loss to the bit."""
    optimizer = optimizer_of(one_rank_world, precision="fp16", loss_scale=2.0**12)
    scale = loss_scale_of(optimizer)
    assert scale(torch.tensor(3.0)).item() == 3.0 * 2**12
    generator, expected = torch.Generator().manual_seed(0), []
    for group in optimizer.chained_optimizers[0].float16_groups:
        for parameter in group:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.main_grad = gradient * 2**12
            expected.append(gradient)
    assert optimizer.prepare_grads() is False
    mains = [p for group in optimizer.chained_optimizers[0].fp32_from_float16_groups for p in group]
    assert all(torch.equal(main.grad, gradient) for main, gradient in zip(mains, expected, strict=True))
