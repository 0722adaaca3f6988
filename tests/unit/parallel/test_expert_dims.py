"""Impossible expert layouts are refused before any memory is allocated, with the numbers and the cure."""

from typing import Optional

import pytest

from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel
from dit.settings import TrainingConfig


def check(num_experts: Optional[int], world_size: int, **parallel) -> ParallelDims:
    model = DiTConfig(num_attention_heads=8, num_layers=4, num_experts=num_experts)
    return check_parallel(model, ParallelConfig(**parallel), TrainingConfig(global_batch_size=24), world_size)


@pytest.mark.parametrize(
    ("num_experts", "world_size", "parallel", "message"),
    [
        (None, 2, {"expert_model_parallel_size": 2}, r"parallel_size=2.*model has none.*model\.num_experts"),
        (6, 4, {"expert_model_parallel_size": 4}, r"num_experts=6.*expert_model_parallel_size=4.*\[1, 2, 3, 6\]"),
        (4, 2, {"tensor_model_parallel_size": 2}, r"num_experts=4.*size=2 needs parallel\.sequence_parallel=True"),
        (4, 6, {"expert_model_parallel_size": 4}, r"expert_model_parallel_size=4.*TP 1 x CP 1 x DP 6 = 6.*\[1, 2\]"),
    ],
)
def test_impossible_layouts_are_named(num_experts, world_size, parallel, message):
    with pytest.raises(ConfigError, match=message):
        check(num_experts, world_size, **parallel)


@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_experts_may_be_shared_by_the_ranks_of_one_replica(context_parallel_size: int):
    """Tensor- and context-parallel ranks also count as expert-parallel ranks, so one replica is enough."""
    world = 2 * context_parallel_size
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": world}
    dims = check(4, world, context_parallel_size=context_parallel_size, **layout)
    assert dims.data_parallel_size == 1
