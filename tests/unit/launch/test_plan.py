"""A plan without ranks or memory agrees with what ranks would hold."""

from dataclasses import asdict, replace

import fiddle
import pytest

from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.parallel.dims import ParallelConfig
from dit.training.flops import flops_per_token
from dit.training.settings import TrainingConfig
from launch import plan
from launch.train import call_recipe

MODEL = DiTConfig(hidden_size=64, num_layers=2, num_attention_heads=4, num_classes=10)
TRAINING = TrainingConfig(micro_batch_size=2, global_batch_size=8, precision="fp32", ema_decay=0.9)
DDP = ParallelConfig(data_parallel="ddp")
SHARDED = ParallelConfig(data_parallel="distributed_optimizer")
N = MODEL.num_parameters()


def test_plain_data_parallel_memory_is_a_hand_count():
    need = plan.estimate_memory(MODEL, TRAINING, DDP, data_parallel_size=4, tokens=16)
    assert (need.weights, need.gradients, need.optimizer, need.average) == (4 * N, 4 * N, 8 * N, 4 * N)
    assert need.total == sum(asdict(need).values())


def test_bf16_adds_a_master_copy_and_halves_weights_and_activations():
    full = plan.estimate_memory(MODEL, TRAINING, DDP, 1, tokens=16)
    half = plan.estimate_memory(MODEL, replace(TRAINING, precision="bf16"), DDP, 1, tokens=16)
    assert (half.weights, half.gradients, half.optimizer) == (2 * N, 4 * N, 12 * N)
    assert half.activations * 2 == full.activations


def test_the_distributed_optimizer_spreads_states_and_average_only():
    whole = plan.estimate_memory(MODEL, TRAINING, SHARDED, 1, tokens=16)
    spread = plan.estimate_memory(MODEL, TRAINING, SHARDED, 4, tokens=16)
    assert (spread.weights, spread.gradients) == (whole.weights, whole.gradients)
    assert (spread.optimizer, spread.average) == (whole.optimizer // 4, whole.average // 4)


@pytest.mark.parametrize(
    ("sharding", "spread"),
    [
        ("optim", {"optimizer", "average"}),
        ("optim_grads", {"optimizer", "average", "gradients"}),
        ("optim_grads_params", {"optimizer", "average", "gradients", "weights"}),
    ],
)
def test_fsdp_spreads_what_it_is_told_to(sharding, spread):
    fsdp = ParallelConfig(data_parallel="fsdp", fsdp_sharding=sharding)
    one, four = (asdict(plan.estimate_memory(MODEL, TRAINING, fsdp, ranks, tokens=16)) for ranks in (1, 4))
    assert {name for name in one if four[name] < one[name]} == spread
    assert all(four[name] == one[name] // 4 for name in spread)


def test_experts_are_shared_and_their_states_spread_over_their_own_copies():
    """Over 4 ranks with EP 2, each expert has two copies; dense parameters have four."""
    model = replace(MODEL, num_experts=4, moe_ffn_hidden_size=32)
    h, layers = model.hidden_size, model.num_layers
    experts = layers * 4 * (2 * h * 32 + 32 + h)
    dense = model.num_parameters() - experts
    shared = replace(SHARDED, expert_model_parallel_size=2)
    need = plan.estimate_memory(model, TRAINING, shared, data_parallel_size=4, tokens=16)
    assert need.weights == 4 * (dense + experts // 2)
    assert need.optimizer == 8 * dense // 4 + 8 * (experts // 2) // 2


def test_without_an_average_there_is_none():
    assert plan.estimate_memory(MODEL, replace(TRAINING, ema_decay=None), DDP, 1, tokens=16).average == 0


def test_tensor_parallel_ranks_hold_half_of_the_split_and_all_of_the_rest():
    from dit.parallel.parallelize import build_on_meta

    whole = dict(build_on_meta(MODEL).named_parameters())
    h, f, layers = MODEL.hidden_size, MODEL.ffn_size, MODEL.num_layers
    # qkv, both MLP matrices and the projection; the biases of the column-parallel ones.
    split = layers * (3 * h * h + h * h + 2 * h * f + 3 * h + f)
    assert plan.local_parameters(whole.values(), 1) == N
    assert plan.local_parameters(whole.values(), 2) == N - split // 2


def test_sequence_parallelism_splits_all_activations():
    one, two, two_sp = (
        plan.estimate_memory(MODEL, TRAINING, replace(DDP, **kwargs), 1, tokens=16).activations
        for kwargs in (
            {},
            {"tensor_model_parallel_size": 2},
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        )
    )
    assert two_sp * 2 == one
    assert two_sp < two < one


def test_pipeline_ranks_hold_their_stage_and_a_copy_of_the_embedders():
    from dit.parallel.parallelize import build_on_meta

    sizes = {name: p.numel() for name, p in build_on_meta(MODEL).named_parameters()}
    first = sum(n for name, n in sizes.items() if name.startswith(("conditioner.", "embed.", "layers.0.")))
    last = sum(n for name, n in sizes.items() if name.startswith(("conditioner.", "head.", "layers.1.")))
    piped = replace(DDP, pipeline_model_parallel_size=2)
    need = plan.estimate_memory(MODEL, TRAINING, piped, data_parallel_size=1, tokens=16)
    whole = plan.estimate_memory(MODEL, TRAINING, DDP, data_parallel_size=1, tokens=16)
    per_parameter = whole.total - whole.activations
    assert per_parameter % N == 0
    # Two micro-batches are under way on the first rank, each through half of the layers; one on the last.
    on_first = per_parameter // N * first + whole.activations
    on_last = per_parameter // N * last + whole.activations // 2
    assert need.total == max(on_first, on_last)


def activations(parallel=DDP, **training):
    return plan.estimate_memory(MODEL, replace(TRAINING, **training), parallel, 1, tokens=16).activations


def test_recompute_keeps_what_the_report_says():
    h, f, rows = MODEL.hidden_size, MODEL.ffn_size, TRAINING.micro_batch_size * 16 * 4
    layer = rows * (10 * h + 2 * f)
    assert activations() == 2 * layer
    assert activations(recompute="selective") == 2 * layer - 2 * rows * (2 * h + f)
    assert activations(recompute="full") == layer + 2 * rows * h
    assert activations(recompute="full", recompute_layers=1) == 2 * layer + rows * h


def test_a_size_that_does_not_divide_is_refused():
    from dit.parallel.parallelize import build_on_meta

    with pytest.raises(ConfigError, match="tensor_model_parallel_size=3"):
        plan.local_parameters(build_on_meta(MODEL).parameters(), 3)


def test_the_report_says_what_was_asked_for():
    task = call_recipe("letters_dit")
    text = plan.report(task, world_size=2, tokens=16)
    assert "64 samples = 1 micro-batches x 32 x 2 replicas" in text
    assert "16 to a sample" in text
    with pytest.raises(ConfigError, match="global_batch_size=64"):
        plan.report(task, world_size=3)


def test_the_fewest_ranks_are_taken_when_none_are_given():
    task = call_recipe("tiny_dit")
    task.parallel.tensor_model_parallel_size = 4
    assert "ranks       4 = tensor 4 x data 1" in plan.report(task, world_size=None)


def test_the_plan_of_made_up_data_is_for_its_largest_sample():
    """A clip of 24 x 32 x 32 patches, of whose pairs of tokens attention in frames and columns leaves most out."""
    task = call_recipe("mock_stdit_xl")
    model, grid = fiddle.build(task.model), (24, 32, 32)
    assert plan.planned_sample(task, model) == (24_576, grid)
    assert plan.planned_sample(call_recipe("tiny_stdit"), model) == (64, (4, 4, 4))
    assert plan.planned_sample(call_recipe("pretrain_stdit_xl"), model) == (256, None)
    per_token = flops_per_token(model, 24_576, grid=grid)
    assert f"{per_token / 1e9:,.4g} GFLOP per token (24576 to a sample)" in plan.report(task, None)
    assert "(100 to a sample)" in plan.report(task, None, tokens=100)
