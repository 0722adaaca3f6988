"""The weight average against its written-out formula."""

import pytest
import torch
from torch import nn

from dit.optimizer.ema import EMA
from dit.optimizer.master_weights import MasterShard

DECAY = 0.75


def shard(values: torch.Tensor) -> MasterShard:
    parameter = nn.Parameter(values)
    return MasterShard("w", parameter, 0, values.numel(), parameter, {}, None)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("start", [0, 4])
def test_the_average_is_its_formula(start: int, offload: bool) -> None:
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


def test_an_average_in_host_memory_is_equal_to_the_bit_and_never_the_weights_themselves() -> None:
    """On CPU the two differ in nothing but where they are; neither shares memory with the weights."""
    own = shard(torch.linspace(0, 1, 7))
    averages = [EMA([own], DECAY, offload=offload) for offload in (False, True)]
    own.parameter.data.mul_(3)
    assert all(torch.equal(ema.values[0], torch.linspace(0, 1, 7)) for ema in averages)
    for step in (1, 2):
        for ema in averages:
            ema.update(step)
    assert torch.equal(averages[0].values[0], averages[1].values[0])
