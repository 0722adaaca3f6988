"""A plan without ranks or memory agrees with what ranks would hold."""

import re
from dataclasses import asdict, replace

import fiddle
import pytest

from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.monitoring.flops import flops_per_token
from dit.objectives.ddpm import DDPM
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from launch import plan
from launch.config_file import built
from launch.train import call_recipe

MODEL = DiTConfig(hidden_size=64, num_layers=2, num_attention_heads=4, num_classes=10)
TRAINING = TrainingConfig(micro_batch_size=2, global_batch_size=8, precision="fp32", ema_decay=0.9)
DDP = ParallelConfig(data_parallel="ddp")
SHARDED = ParallelConfig(data_parallel="distributed_optimizer")
SAMPLE = plan.Sample(16)
N = MODEL.num_parameters()


def test_plain_data_parallel_memory_is_a_hand_count():
    need = plan.estimate_memory(MODEL, TRAINING, DDP, data_parallel_size=4, sample=SAMPLE)
    assert (need.weights, need.gradients, need.optimizer, need.average) == (4 * N, 4 * N, 8 * N, 4 * N)
    assert need.total == sum(asdict(need).values())


def test_bf16_adds_a_master_copy_and_halves_weights_and_activations():
    full = plan.estimate_memory(MODEL, TRAINING, DDP, 1, sample=SAMPLE)
    half = plan.estimate_memory(MODEL, replace(TRAINING, precision="bf16"), DDP, 1, sample=SAMPLE)
    assert (half.weights, half.gradients, half.optimizer) == (2 * N, 4 * N, 12 * N)
    assert half.activations * 2 == full.activations


def test_the_distributed_optimizer_spreads_states_and_average_only():
    whole = plan.estimate_memory(MODEL, TRAINING, SHARDED, 1, sample=SAMPLE)
    spread = plan.estimate_memory(MODEL, TRAINING, SHARDED, 4, sample=SAMPLE)
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
    one, four = (asdict(plan.estimate_memory(MODEL, TRAINING, fsdp, ranks, sample=SAMPLE)) for ranks in (1, 4))
    assert {name for name in one if four[name] < one[name]} == spread
    assert all(four[name] == one[name] // 4 for name in spread)


def test_experts_are_shared_and_their_states_spread_over_their_own_copies():
    """Over 4 ranks with EP 2, each expert has two copies; dense parameters have four."""
    model = replace(MODEL, num_experts=4, moe_ffn_hidden_size=32)
    h, layers = model.hidden_size, model.num_layers
    experts = layers * 4 * (2 * h * 32 + 32 + h)
    dense = model.num_parameters() - experts
    shared = replace(SHARDED, expert_model_parallel_size=2)
    need = plan.estimate_memory(model, TRAINING, shared, data_parallel_size=4, sample=SAMPLE)
    assert need.weights == 4 * (dense + experts // 2)
    assert need.optimizer == 8 * dense // 4 + 8 * (experts // 2) // 2


def test_without_an_average_there_is_none():
    assert plan.estimate_memory(MODEL, replace(TRAINING, ema_decay=None), DDP, 1, sample=SAMPLE).average == 0


def test_tensor_parallel_ranks_hold_half_of_the_split_and_all_of_the_rest():
    from dit.parallel.build import build_on_meta

    whole = dict(build_on_meta(MODEL).named_parameters())
    h, f, layers = MODEL.hidden_size, MODEL.ffn_size, MODEL.num_layers
    # qkv, both MLP matrices and the projection; the biases of the column-parallel ones.
    split = layers * (3 * h * h + h * h + 2 * h * f + 3 * h + f)
    assert plan.local_parameters(whole.values(), 1) == N
    assert plan.local_parameters(whole.values(), 2) == N - split // 2


def test_sequence_parallelism_splits_all_activations():
    training = replace(TRAINING, micro_batch_size=1)
    one, two, two_sp = (
        plan.estimate_memory(MODEL, training, replace(DDP, **kwargs), 1, sample=SAMPLE).activations
        for kwargs in (
            {},
            {"tensor_model_parallel_size": 2},
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        )
    )
    assert two_sp * 2 == one
    assert two_sp < two < one


def test_pipeline_ranks_hold_their_stage_and_a_copy_of_the_embedders():
    from dit.parallel.build import build_on_meta

    sizes = {name: p.numel() for name, p in build_on_meta(MODEL).named_parameters()}
    first = sum(n for name, n in sizes.items() if name.startswith(("conditioner.", "embed.", "layers.0.")))
    last = sum(n for name, n in sizes.items() if name.startswith(("conditioner.", "head.", "layers.1.")))
    piped = replace(DDP, pipeline_model_parallel_size=2)
    need = plan.estimate_memory(MODEL, TRAINING, piped, data_parallel_size=1, sample=SAMPLE)
    whole = plan.estimate_memory(MODEL, TRAINING, DDP, data_parallel_size=1, sample=SAMPLE)
    per_parameter = whole.total - whole.activations
    assert per_parameter % N == 0
    # Two micro-batches are under way on the first rank, each through half of the layers; one on the last.
    on_first = per_parameter // N * first + whole.activations
    on_last = per_parameter // N * last + whole.activations // 2
    assert need.total == max(on_first, on_last)


def activations(parallel=DDP, **training):
    return plan.estimate_memory(MODEL, replace(TRAINING, **training), parallel, 1, sample=SAMPLE).activations


def test_recompute_keeps_what_the_report_says():
    """Of a layer: both norms, modulated norms and outputs with the layer's input, q, k, v and output, and the MLP."""
    h, f, rows = MODEL.hidden_size, MODEL.ffn_size, TRAINING.micro_batch_size * 16 * 4
    layer = rows * (8 * h + 4 * h + 2 * f)
    assert activations() == 2 * layer
    assert activations(recompute="selective") == 2 * layer - 2 * rows * (4 * h + f)
    assert activations(recompute="full") == layer + 2 * rows * h
    assert activations(recompute="full", recompute_layers=1) == 2 * layer + rows * h


def test_text_is_replicated_over_context_parallel_ranks():
    model = DiTCrossConfig(hidden_size=64, num_layers=2, num_attention_heads=4)
    sizes = {"text_tokens": 8}

    def kept(context_size, tokens, **text):
        parallel = replace(DDP, context_parallel_size=context_size)
        training = replace(TRAINING, micro_batch_size=1)
        return plan.estimate_memory(model, training, parallel, 1, plan.Sample(tokens, **text)).activations

    text = kept(1, 16, **sizes) - kept(1, 16)
    assert text == 4 * 8 * model.num_layers * 3 * model.hidden_size  # keys, normed keys, values
    assert kept(2, 16, **sizes) == kept(1, 8) + text


def test_each_sample_of_a_pack_brings_its_text_and_each_row_its_modulation():
    model = DiTCrossConfig(hidden_size=64, num_layers=2, num_attention_heads=4)
    training = replace(TRAINING, micro_batch_size=1)
    one, pack = (
        plan.estimate_memory(model, training, DDP, 1, plan.Sample(16, text_tokens=8, pack=pack)).activations
        for pack in (None, 64)
    )
    assert pack == 4 * one + 4 * 64 * model.num_layers * 3 * 2 * model.hidden_size  # scale and gate of 3 sub-layers


def test_a_pipeline_adds_up_its_own_kinds_of_layers():
    """FLUX's first rank holds joint layers, its last single ones; each keeps its own for one micro-batch."""
    model = FluxConfig(
        hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_joint_layers=2, num_single_layers=2
    )
    sample, training = plan.Sample(16, text_tokens=8), replace(TRAINING, micro_batch_size=1, global_batch_size=1)
    halves = [
        plan._activations(model, training, replace(DDP, pipeline_model_parallel_size=2), 1, sample, rank)
        for rank in (0, 1)
    ]
    assert sum(halves) == plan._activations(model, training, DDP, 1, sample, 0)
    assert halves[0] == 2 * 4 * 24 * (8 * 64 + 7 * 64 + 2 * 256)


def test_a_size_that_does_not_divide_is_refused():
    from dit.parallel.build import build_on_meta

    with pytest.raises(ConfigError, match="tensor_model_parallel_size=3"):
        plan.local_parameters(build_on_meta(MODEL).parameters(), 3)


def test_the_report_says_what_was_asked_for():
    task = call_recipe("letters_dit")
    text = plan.report(task, world_size=2, tokens=(16,))
    assert "64 samples = 1 micro-batches x 32 x 2 replicas" in text
    assert "16 to a sample" in text
    with pytest.raises(ConfigError, match="global_batch_size=64"):
        plan.report(task, world_size=3)


def test_the_micro_batch_is_the_largest_that_fits():
    """Both by arithmetic: the largest divisor of a replica's share of 256 that is at most 32, and its memory."""
    task = call_recipe("dit_xl2_imagenet")
    for ranks, size in ((1, 32), (8, 32), (16, 16), (32, 8), (256, 1)):
        dims, _ = built(task).check(ranks)
        assert (dims.micro_batch_size, dims.micro_batches) == (size, 256 // ranks // size)
    task.training.micro_batch_size = 48
    assert built(task).check(1)[0].micro_batch_size == 32
    task.training.micro_batch_size = 32
    text, asked = plan.report(task, 32), "micro-batches of 8, not training.micro_batch_size=32: a global batch of 256"
    assert asked in text
    task.training.micro_batch_size = 8
    alone = plan.report(task, 32)
    assert asked not in alone
    assert text.partition("memory per rank")[2] == alone.partition("memory per rank")[2]


@pytest.mark.parametrize(
    ("world_size", "interleaved", "words"),
    [
        (3, False, ["global_batch_size=64", "data-parallel size 3", "use 63 or 66", "such as for 2 replicas"]),
        (128, False, ["global_batch_size=64", "use 128", "such as for 64 replicas"]),
        (24, True, ["global_batch_size=64", "=2 micro-batches", "12 data-parallel replicas", "use 48 or 72"]),
    ],
)
def test_a_global_batch_that_no_micro_batch_divides_is_refused(world_size, interleaved, words):
    task = call_recipe("letters_dit")
    task.model.num_layers, task.data.num_streams = 4, None
    if interleaved:
        task.parallel.pipeline_model_parallel_size = task.parallel.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError) as caught:
        plan.report(task, world_size)
    assert all(word in str(caught.value) for word in words)


def test_a_short_run_says_how_its_warm_up_changes():
    task = call_recipe("letters_dit")
    task.training.num_steps = 50
    assert "a warm-up of 50 steps, not schedule.warmup_steps=" in plan.report(task, None)


def test_the_fewest_ranks_are_taken_when_none_are_given():
    task = call_recipe("tiny_dit")
    task.parallel.tensor_model_parallel_size = 4
    assert "ranks       4 = tensor 4 x data 1, data_parallel=ddp; the fewest" in plan.report(task, world_size=None)
    assert "the fewest" not in plan.report(task, world_size=4)


@pytest.mark.parametrize(
    "change",
    [{"schedule.min_lr": 1.0}, {"optimizer.lr": -1.0}, {"training.log_interval": 0}, {"model.out_channels": 2}],
    ids=str,
)
def test_what_training_would_refuse_is_not_planned(change):
    task = call_recipe("letters_dit")
    for path, value in change.items():
        part, _, field = path.partition(".")
        setattr(getattr(task, part), field, value)
    with pytest.raises(ConfigError):
        plan.report(task, world_size=None)


def test_the_plan_of_synthetic_data_is_for_its_largest_sample():
    """A clip of 24 x 32 x 32 patches, of whose pairs of tokens attention in frames and columns leaves most out."""
    task = call_recipe("mock_stdit_xl")
    model, grid = fiddle.build(task.model), (24, 32, 32)
    assert plan.planned_sample(task, model) == plan.Sample(24_576, grid, 512)
    assert plan.planned_sample(call_recipe("tiny_stdit"), model) == plan.Sample(64, (4, 4, 4), 8, pack=128)
    per_token = flops_per_token(model, 24_576, 512, grid=grid)
    assert f"{per_token / 1e9:,.4g} GFLOP per token (24576 to a sample, 512 of text)" in plan.report(task, None)
    assert "(100 to a sample, 7 of text; full" in plan.report(task, None, tokens=(100,), text_tokens=7)


@pytest.mark.parametrize(
    ("recipe", "sample"),
    [
        ("pretrain_7b", plan.Sample(260, text_tokens=512)),
        ("pretrain_7b_pack", plan.Sample(2304, text_tokens=512, pack=2304)),
        ("dit_xl2_imagenet", plan.Sample(256, assumed=True)),
    ],
)
def test_real_data_is_planned_by_its_limits(recipe, sample):
    task = call_recipe(recipe)
    assert plan.planned_sample(task, fiddle.build(task.model)) == sample


def test_a_grid_leaves_out_what_a_plain_number_counts():
    """The same tokens: as a number they are billed full attention, and the report says so; as patches they are not."""
    task = call_recipe("pretrain_stdit_xl")
    model, grid = fiddle.build(task.model), (24, 32, 32)
    plain, clip = (plan.report(task, None, tokens) for tokens in ((24_576,), grid))
    assert "--tokens TxHxW" in plain
    assert "--tokens TxHxW" not in clip
    assert f"{flops_per_token(model, 24_576, 512, grid=grid) / 1e9:,.4g} GFLOP per token" in clip
    assert plain.partition("memory per rank")[2] == clip.partition("memory per rank")[2]


def test_a_pack_holds_as_many_samples_as_fit():
    """Nine images of 256 tokens and their texts; a step's work counts all of them."""
    task = call_recipe("pretrain_7b_pack")
    assert "512 packs = 32 micro-batches x 1 x 16 replicas" in plan.report(task, 16)
    sample = plan.planned_sample(task, fiddle.build(task.model), tokens=(256,))
    assert (sample.rows(1), sample.text_rows(1)) == (2304, 9 * 512)
    per_token = flops_per_token(fiddle.build(task.model), 256, 512)
    assert f"{per_token * 2304 * 512 / 1e12:,.4g} TFLOP per step" in plan.report(task, 16, tokens=(256,))


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("sampling", "num_steps", 0),
        ("sampling", "num_steps", -1),
        ("sampling", "samples_per_class", -1),
        ("sampling", "guidance_scale", float("inf")),
        ("sampling", "guidance_scale", float("nan")),
        ("sampling", "solver", "rk45"),
        ("logging", "profile_steps", [5, 2]),
    ],
)
def test_a_plan_refuses_what_training_would(part, setting, value):
    """A run would find out at its first pictures, or at once."""
    task = call_recipe("tiny_dit")
    setattr(getattr(task, part), setting, value)
    with pytest.raises(ConfigError, match=re.escape(f"{part}.{setting}={value!r}")):
        plan.report(task, None)


def test_a_plan_refuses_more_sampling_steps_than_the_objective_has():
    task = call_recipe("tiny_dit")
    task.objective = fiddle.Config(DDPM, discrete_steps=30)
    task.sampling.num_steps = 31
    with pytest.raises(ConfigError, match="31 sampling steps"):
        plan.report(task, None)
