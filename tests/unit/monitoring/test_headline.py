"""The first line that a run prints names its parallel layout."""

from types import SimpleNamespace

import pytest

from dit.monitoring.run_log import headline
from dit.parallel.dims import ParallelConfig, ParallelDims
from launch.config_file import built
from launch.train import call_recipe


@pytest.mark.parametrize(("instances", "words"), [(1, "x DP 4 (fsdp) |"), (2, "x DP 4 (fsdp, 2 instances) |")])
def test_the_headline_names_the_instances_of_hybrid_sharding(instances: int, words: str):
    config = built(call_recipe("tiny_dit"))
    config.parallel = ParallelConfig(data_parallel="fsdp", num_distributed_optimizer_instances=instances)
    state = SimpleNamespace(shards=[], step=0)
    assert words in headline(config, ParallelDims(4, 4, 1, 2, 1), state, resumed=False)
