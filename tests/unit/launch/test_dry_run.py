"""Dry runs: memory and work of a run, planned without ranks; tests/parallel/test_trace.py compares with real ranks."""

import re

import fiddle
import pytest

from dit.convert.diffusers_format import export_line
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.monitoring.flops import PackFlops
from dit.parallel.build import count_parameters
from dit.parallel.dims import ParallelDims
from launch import dry_run
from launch.config_file import built
from launch.overrides import apply_overrides
from launch.planned_sample import Sample, planned_sample
from launch.train import call_recipe


def laid_out(task, world_size=None):
    """Return the lines of the report that describe the layout."""
    config = built(task)
    dims, _ = config.check(world_size)
    return "\n".join(dry_run.layout_lines(config, dims, packed=False, requested=world_size is not None))


def test_the_report_has_the_requested_settings_and_their_cost(capsys):
    """FLOPs come from the traced program; memory is computed by hand for fp32 and Adam on one rank."""
    task = call_recipe("tiny_dit")
    text = dry_run.report(task, world_size=1, tokens=(4, 4, 2), text_tokens=3)
    assert capsys.readouterr().err == "tracing a step: 1 rank = tensor 1 x data 1\n"
    assert f"\nexport      {export_line(fiddle.build(task.model))}\n" in text
    assert "8 samples = 2 micro-batches x 4 x 1 replicas" in text
    assert "32 in a sample of 4x4x2 patches, 3 of text)" in text
    count = int(re.search(r"parameters +([\d,]+)", text)[1].replace(",", ""))
    model = fiddle.build(task.model)
    assert count == count_parameters(model)
    flops = PackFlops(model).training(SequenceLayout.from_lengths([32]), [(4, 4, 2)])
    assert f"{flops / 32 / 1e9:,.4g} GFLOP per token" in text
    assert f"{8 * flops / 1e12:,.4g} TFLOP per step" in text
    rows = {name: float(size) for name, size in re.findall(r"^  (\w.*?) +([\d.]+) GiB$", text, re.MULTILINE)}
    for name, bytes_each in (("weights and gradients", 8), ("optimizer", 8), ("average", 4)):
        assert rows[name] == pytest.approx(bytes_each * count / dry_run.GIB, abs=1e-3), name
    assert rows["total"] == pytest.approx(sum(rows.values()) - rows["total"], abs=2e-3)


@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        ("dit_xl2_imagenet", {"latent [4, T, H, W]", "label 0 to 999", "fps (optional)"}),
        ("flux_12b", {"latent [16, T, H, W]", "text [K, 4096]", "pooled [768]", "fps (optional)"}),
        (
            "imagen_600m_res_256",
            {
                "latent [3, T, H, W]",
                "text [K, 1024]",
                "low_resolution [3, T, H, W] (optional)",
                "augmentation (optional)",
                "fps (optional)",
            },
        ),
        ("sit_xl2_repa", {"latent [4, T, H, W]", "label 0 to 999", "teacher [768, t, h, w]", "fps (optional)"}),
    ],
)
def test_the_report_lists_the_values_of_a_sample(recipe, values):
    task = call_recipe(recipe)
    line = dry_run.sample_line(fiddle.build(task.model), fiddle.build(task.objective).conditions)
    assert set(re.split(r", (?=[a-z])(?![^\[]*\])", line.removeprefix("sample").strip())) == values


def test_networks_of_the_objective_are_counted():
    """The discriminator has convolutions 4 x 4 from 3 channels to one score, with one bias and three norms."""
    task = call_recipe("pictogram_autoencoder")
    apply_overrides(task, ["objective.adversarial=adversarial"])
    text = dry_run.report(task, world_size=1, tokens=(1, 4, 4))
    line = r"parameters +([\d,]+), and ([\d,]+) of networks that the objective adds\n"
    count, added = (int(number.replace(",", "")) for number in re.search(line, text).groups())
    assert count == count_parameters(fiddle.build(task.model))
    assert added == 16 * (3 * 64 + 64 * 128 + 128 * 256 + 256 * 512 + 512) + 64 + 2 * (128 + 256 + 512)
    assert f"checkpoint  {16 * (count + added) / dry_run.GIB:,.3f} GiB" in text


def test_the_micro_batch_is_the_largest_that_fits():
    """It is the largest divisor of a replica's share of 256 that is at most 32."""
    task = call_recipe("dit_xl2_imagenet")
    for ranks, size in ((1, 32), (8, 32), (16, 16), (32, 8), (256, 1)):
        dims, _ = built(task).check(ranks)
        assert (dims.micro_batch_size, dims.micro_batches) == (size, 256 // ranks // size)
    task.training.micro_batch_size = 48
    assert built(task).check(1)[0].micro_batch_size == 32
    task.training.micro_batch_size = 32
    asked = "micro-batches of 8, not training.micro_batch_size=32: a global batch of 256"
    assert asked in laid_out(task, 32)
    task.training.micro_batch_size = 8
    assert asked not in laid_out(task, 32)


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
        dry_run.report(task, world_size)
    assert all(word in str(caught.value) for word in words)


def test_the_default_is_the_smallest_number_of_ranks():
    task = call_recipe("tiny_dit")
    task.parallel.tensor_model_parallel_size = 4
    assert "ranks       4 = tensor 4 x data 1, data_parallel=ddp; the fewest" in laid_out(task)
    assert "the fewest" not in laid_out(task, world_size=4)


def test_the_layout_names_the_instances_of_hybrid_sharding():
    task = call_recipe("tiny_dit")
    task.parallel.data_parallel = "fsdp"
    assert "data 4, data_parallel=fsdp\n" in laid_out(task, world_size=4)
    task.parallel.num_distributed_optimizer_instances = 2
    assert "data 4, data_parallel=fsdp, 2 instances\n" in laid_out(task, world_size=4)


def test_the_plan_of_synthetic_data_is_for_its_largest_sample():
    """A clip of 24 x 32 x 32 patches; attention in frames and columns leaves out most pairs of its tokens."""
    task = call_recipe("mock_stdit_xl")
    model = fiddle.build(task.model)
    assert planned_sample(fiddle.build(task.data), model) == Sample((24, 32, 32), 512)
    assert planned_sample(fiddle.build(call_recipe("tiny_stdit").data), model) == Sample((4, 4, 4), 8, pack=128)
    assert planned_sample(fiddle.build(task.data), model, tokens=(2, 3, 4), text_tokens=7) == Sample((2, 3, 4), 7)


@pytest.mark.parametrize(
    ("recipe", "sample"),
    [
        ("pretrain_7b", Sample((1, 13, 20), 512, assumed="shape")),
        ("pretrain_7b_pack", Sample((1, 48, 48), 512, pack=2304, assumed="shape")),
        ("pretrain_ditllama5b_stage2", Sample((2, 64, 64), 512, pack=8192, assumed="shape")),
        ("dit_xl2_imagenet", Sample((1, 16, 16), assumed="size")),
        ("imagen_500m_res_64_edm", Sample((1, 64, 64), 128)),
        ("imagen_600m_res_1024", Sample((1, 256, 256), 128)),
    ],
)
def test_plans_of_stored_data_use_its_limits_or_crops(recipe, sample):
    """If only a number of tokens is known, the plan assumes and reports a picture as square as possible."""
    task = call_recipe(recipe)
    assert planned_sample(fiddle.build(task.data), fiddle.build(task.model)) == sample


def test_a_pack_holds_as_many_samples_as_fit():
    """Nine images of 256 tokens and their texts, padded to sizes that context and sequence parallelism split evenly."""
    task = call_recipe("pretrain_7b_pack")
    sample = planned_sample(fiddle.build(task.data), fiddle.build(task.model), tokens=(256,))
    shape = sample.shape(ParallelDims(16, 16, 1, 32, 8))
    assert (len(shape.grids), shape.text_lengths, shape.layout().total_tokens) == (9, (512,) * 9, 2304)
    assert Sample((1, 3, 3), pack=30).shape(ParallelDims(1, 1, 1, 1, 8)).layout().total_tokens == 48


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("optimizer", "lr", -1.0),
        ("sampling", "num_steps", 0),
        ("sampling", "solver", "rk45"),
        ("logging", "profile_steps", [5, 2]),
    ],
)
def test_a_plan_refuses_settings_that_training_refuses(part, setting, value):
    """Otherwise a run would fail at its start or at its first pictures."""
    task = call_recipe("tiny_dit")
    setattr(getattr(task, part), setting, value)
    with pytest.raises(ConfigError, match=re.escape(f"{part}.{setting}={value!r}")):
        dry_run.report(task, None)


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("own_data", "diffusers' PixArtTransformer2DModel"),
        ("own_data(backbone='dit')", "no export to diffusers: diffusers 0.38.0 has no model like DiTCrossConfig"),
        ("tiny_stdit", "PixArtTransformer2DModel does not support this model: qk_layernorm=True"),
    ],
)
def test_the_line_of_exports_states_whether_diffusers_can_load_the_model(recipe: str, line: str):
    assert export_line(built(call_recipe(recipe)).model).endswith(line)
