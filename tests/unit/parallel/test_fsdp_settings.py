"""Settings that Megatron-FSDP does not support are refused before anything is built; all others are passed to it."""

import pytest
from torch import nn

from dit.backends.process_groups import ProcessGroups
from dit.backends.sharding import ParameterSharding, set_sharding
from dit.errors import ConfigError
from dit.models.base import Backbone, Stage
from dit.models.dit.config import DiTConfig
from dit.parallel.dims import ParallelConfig, check_parallel, fewest_ranks
from dit.settings import TrainingConfig

SHARDINGS = ("optim", "optim_grads", "optim_grads_params")


INSTANCES = "num_distributed_optimizer_instances"
TP4CP8 = {"tensor_model_parallel_size": 4, "context_parallel_size": 8}
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def checked(world_size=4, num_experts=None, data_parallel="fsdp", **parallel):
    model = DiTConfig(num_attention_heads=4, num_layers=4, num_experts=num_experts)
    parallel = ParallelConfig(data_parallel=data_parallel, **parallel)
    return check_parallel(model, parallel, TrainingConfig(global_batch_size=8), world_size)


@pytest.mark.parametrize("kind", SHARDINGS)
@pytest.mark.parametrize("layout", [{}, TP2SP])
def test_every_sharding_combines_with_tensor_parallelism(kind, layout):
    assert checked(fsdp_sharding=kind, **layout).data_parallel_size == (2 if layout else 4)


def test_overlaps_that_always_happen_may_be_requested():
    """So a recipe with both overlaps can switch to FSDP with one setting."""
    both = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert checked(**both) == checked()
    assert checked(fsdp_sharding="optim_grads", overlap_grad_reduce=True) == checked()


def test_experts_need_copies_to_be_sharded():
    assert checked(num_experts=4, expert_model_parallel_size=2) == checked()
    assert checked(num_experts=4, expert_model_parallel_size=4, fsdp_sharding="optim") == checked()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"fsdp_sharding": "optim", "overlap_grad_reduce": True},
            "overlap_grad_reduce=True is not available with .*'opt",
        ),
        (
            {"expert_model_parallel_size": 4, "num_experts": 4},
            "each on only one rank, as with expert_model_parallel_size=4 on TP 1 x CP 1 x DP 4 ranks",
        ),
        (
            {"fsdp_sharding": "optim_grads", "overlap_grad_reduce": True, "overlap_param_gather": True},
            "overlap_param_gather=True is not available with fsdp_sharding='optim_grads'; switch it off or use",
        ),
    ],
)
def test_settings_that_megatron_fsdp_lacks_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        checked(**settings)


@pytest.mark.parametrize("layout", [{}, TP2SP, {"context_parallel_size": 2}, {"context_parallel_size": 8}])
@pytest.mark.parametrize("kind", SHARDINGS)
def test_instances_combine_with_every_sharding_and_layout(kind, layout):
    assert checked(8, fsdp_sharding=kind, **layout, **{INSTANCES: 2}) == checked(8, fsdp_sharding=kind, **layout)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [({}, 4), (TP2SP, 8), ({"context_parallel_size": 2}, 4), ({"context_parallel_size": 3}, 6), (TP4CP8, 32)],
)
def test_the_fewest_ranks_give_each_of_two_instances_at_least_two(layout, ranks):
    parallel = {**layout, INSTANCES: 2}
    assert fewest_ranks(ParallelConfig(data_parallel="fsdp", **parallel)) == ranks
    checked(ranks, **parallel)
    for fewer in range(1, ranks):
        with pytest.raises(ConfigError):
            checked(fewer, **parallel)


@pytest.mark.parametrize(
    ("count", "settings", "says"),
    [
        (0, {}, f"parallel.{INSTANCES}=0 must be a whole number of at least 1"),
        (2, {"data_parallel": "ddp"}, f"{INSTANCES}=2 needs data_parallel=fsdp, got 'ddp'; use 1 or"),
        (2, {"data_parallel": "distributed_optimizer"}, "needs data_parallel=fsdp, got 'distributed_optimizer'"),
        (3, {}, r"=3 cannot split the DP 8 x CP 1 = 8 ranks into 3 groups of equal size .* one of \[1, 2, 4\] \(data_"),
        (8, {}, r"into 8 groups of equal size with at least 2 ranks each; use .* \(data_parallel=ddp keeps a copy on "),
        (4, {**TP2SP, "context_parallel_size": 2}, r"=4 cannot split the DP 2 x CP 2 = 4 ranks .* one of \[1, 2\]"),
        (2, {"num_experts": 4, **TP2SP}, "experts with tensor_model_parallel_size=2 and expert_model_parallel_size=1"),
        (2, {"num_experts": 4, "expert_model_parallel_size": 2}, "would sum their gradients over the wrong ranks; use"),
    ],
)
def test_impossible_instances_are_refused(count, settings, says):
    with pytest.raises(ConfigError, match=says):
        checked(8, **settings, **{INSTANCES: count})


def test_a_backbone_without_fsdp_units_is_refused(one_rank_world: ProcessGroups):
    """Sharded weights are gathered layer by layer, so layers are required; without sharded weights, they are not."""
    from dit.parallel.build import megatron_config, wrap

    class Plain(Backbone):
        def __init__(self) -> None:
            super().__init__(Stage(range(1)))
            self.config = megatron_config(DiTConfig(hidden_size=8, num_attention_heads=1), ParallelConfig(), "fp32")
            self.linear = nn.Linear(8, 8)
            for parameter in self.parameters():
                set_sharding(parameter, ParameterSharding())

        def forward(self, *_):
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"Plain\.fsdp_units is empty; set it or use fsdp_sharding='optim_grads'"):
        wrap([Plain()], ParallelConfig(data_parallel="fsdp"), one_rank_world)
    wrap([Plain()], ParallelConfig(data_parallel="fsdp", fsdp_sharding="optim_grads"), one_rank_world)


@pytest.mark.parametrize("kind", SHARDINGS)
def test_one_data_parallel_rank_shards_no_tensor(one_rank_world: ProcessGroups, kind):
    """Every kind is then the simplest one; fp32 weights need no master copies, others get fp32 master copies."""
    from dit.parallel.build import build_model, wrap

    parallel = ParallelConfig(data_parallel="fsdp", fsdp_sharding=kind)
    for precision, has_masters in (("fp32", False), ("bf16", True)):
        model = DiTConfig(hidden_size=8, num_layers=1, num_attention_heads=1)
        chunks = build_model(model, parallel, TrainingConfig(precision=precision), one_rank_world)
        (wrapped,) = wrap(chunks, parallel, one_rank_world)
        assert wrapped.ddp_config.data_parallel_sharding_strategy == "optim"
        assert wrapped.ddp_config.grad_reduce_in_fp32
        groups = wrapped.param_and_grad_buffer.parameter_groups
        assert all((group.main_weight_buffer is not None) == has_masters for group in groups)
        assert chunks[0].config.no_sync_func is None
