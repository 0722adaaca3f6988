"""The weight average against its formula."""

import pytest
import torch
from torch import nn

from dit.errors import ConfigError
from dit.optimizer.ema import EMA, combination, exponent_of
from dit.optimizer.master_weights import MasterShard
from dit.settings import TrainingConfig

DECAY = 0.75


def shard(values: torch.Tensor) -> MasterShard:
    parameter = nn.Parameter(values)
    return MasterShard("w", parameter, 0, values.numel(), parameter, {}, None)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("start", [0, 4])
def test_the_average_equals_its_formula(start: int, offload: bool) -> None:
    """It equals the weights until the start; then decay * average + (1 - decay) * weights."""
    generator = torch.Generator().manual_seed(0)
    own = shard(torch.randn(5, generator=generator))
    ema = EMA([own], DECAY, start, offload=offload)
    expected = own.main.detach().double()
    for step in range(1, 12):
        weights = torch.randn(5, generator=generator)
        own.parameter.data.copy_(weights)
        ema.update(step)
        expected = weights.double() if step <= start else DECAY * expected + (1 - DECAY) * weights.double()
        torch.testing.assert_close(ema.values[0].double(), expected, rtol=1e-6, atol=1e-7)


def test_an_average_in_host_memory_is_bitwise_equal_and_never_aliases_the_weights() -> None:
    """On CPU, both averages are equal; neither shares memory with the weights."""
    own = shard(torch.linspace(0, 1, 7))
    averages = [EMA([own], DECAY, offload=offload) for offload in (False, True)]
    own.parameter.data.mul_(3)
    assert all(torch.equal(ema.values[0], torch.linspace(0, 1, 7)) for ema in averages)
    for step in (1, 2):
        for ema in averages:
            ema.update(step)
    assert torch.equal(averages[0].values[0], averages[1].values[0])


def test_an_error_under_the_average_restores_the_masters_without_communication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other ranks may not have the error, and would not take part in a gather."""
    own, copies = shard(torch.zeros(3)), []
    ema = EMA([own], DECAY)
    own.parameter.data.fill_(1)
    monkeypatch.setattr("dit.optimizer.ema.copy_masters_to_model", lambda *_: copies.append(own.main[0].item()))
    with ema.applied(None, []):
        pass
    with pytest.raises(OSError, match="shard"), ema.applied(None, []):
        raise OSError("shard")
    assert copies == [0, 1, 0]
    assert torch.equal(own.main, torch.ones(3))
    assert torch.equal(ema.values[0], torch.zeros(3))


def test_exponents_equal_those_of_the_paper() -> None:
    """gamma + 1 for lengths of 5 and 10 %; 1 gives the mean over all steps."""
    assert exponent_of(0.05) == pytest.approx(17.97, abs=0.005)
    assert exponent_of(0.10) == pytest.approx(7.94, abs=0.005)
    assert exponent_of(12**-0.5) == pytest.approx(1.0)


def test_saved_averages_combine_to_other_lengths_and_steps() -> None:
    """Compared with averages updated in every step of a random walk; few snapshots are worse and reported as such."""
    lengths, targets = (0.05, 0.1), ((0.07, 400), (0.15, 400), (0.2, 400), (0.1, 380))
    own = shard(torch.zeros(4096))
    ema = EMA([own], DECAY, sigma_rel=[*lengths, *(length for length, _ in targets)])
    generator, snapshots, direct = torch.Generator().manual_seed(0), {}, {}
    for step in range(1, 401):
        own.parameter.data.add_(torch.randn(4096, generator=generator))
        for average in ema.powers:
            average.update(step)
        values = [average.values[0].clone() for average in ema.powers]
        if step % 25 == 0:
            snapshots |= {(float(step), exponent_of(length)): x for length, x in zip(lengths, values)}
        direct |= {target: x for target, x in zip(targets, values[len(lengths) :]) if target[1] == step}
    for length, step in targets:
        errors = []
        for saved in (snapshots, dict(list(snapshots.items())[-2:])):
            weights, said = combination(list(saved), (float(step), exponent_of(length)))
            combined = sum(weight * x for weight, x in zip(weights, saved.values()))
            error = ((combined - direct[length, step]).norm() / (own.main - direct[length, step]).norm()).item()
            errors.append((error, said))
        (many, said_many), (few, said_few) = errors
        assert many < 0.05
        assert said_many < 0.06
        assert few > many
        assert said_few > said_many


@pytest.mark.parametrize("settings", [{"ema_sigma_rel": [0.3]}, {"ema_sigma_rel": [0.1], "ema_decay": None}])
def test_lengths_out_of_range_or_without_effect_are_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match="ema_sigma_rel"):
        TrainingConfig(run_dir="runs/x", **settings).validate()
