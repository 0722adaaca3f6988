"""A plan from traces of a few layers and micro-batches equals the trace of the full step."""

import threading
import time
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from benchmarks.parallel_training import tiny_model
from dit.errors import ConfigError
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.lora_config import LoRAConfig
from dit.models.routing_config import RoutingConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.planner import trace_cache
from dit.planner.job import Job, steady_state
from dit.planner.plan import plan
from dit.planner.trace import Tracer, fused_rms_norm, trace
from dit.planner.trace_cache import read_traces, write_traces
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.counter import StepTrace
from dit.tracing.packs import PackShape
from launch.config_file import built
from launch.train import call_recipe
from recipes import registry
from tests.support.ranks import rows

PACK = PackShape(((1, 4, 8), (1, 4, 8)), text_lengths=(4, 4))
OF_PEAK = 0.01
MOST_LAYERS = 130
EXPERTS = 8
"""Experts that are traced as long as a layer without any."""
FLUX = {
    "backbone": "flux",
    "num_joint_layers": 2,
    "num_single_layers": 4,
    "ffn_hidden_size": 128,
    "pooled_size": 6,
    "num_attention_heads": 8,
    "rope_axes": [2, 2, 4],
}
CASES = {
    "pp2": ({"num_layers": 12}, {"pipeline_model_parallel_size": 2}, 4),
    "pp2_vpp2": (
        {"num_layers": 16},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        10,
    ),
    "dit_cross": ({"backbone": "dit_cross", "num_layers": 6}, {"data_parallel": "ddp"}, 5),
    "stdit": ({"backbone": "stdit", "num_layers": 12}, {"tensor_model_parallel_size": 2}, 1),
    # Layers of 1.2 B parameters: the gradients of only four layers wait for their reduction.
    "fsdp": ({"num_layers": 10, "hidden_size": 8192}, {"data_parallel": "fsdp"}, 1),
    "one_rank": ({"num_layers": 6}, {}, 4),
    "tread": ({"num_layers": 12, "routing": RoutingConfig()}, {"pipeline_model_parallel_size": 2}, 4),
    "fsdp_of_one_rank": ({"num_layers": 6, "hidden_size": 8192}, {"data_parallel": "fsdp"}, 4),
    # The window has all 6 layers.
    "flux_fsdp": (FLUX, {"data_parallel": "fsdp"}, 5),
    "experts_cp2": ({"num_layers": 6, "num_experts": 4}, {"context_parallel_size": 2}, 5),
}
LONGER = PackShape(((1, 8, 8),) * 3, text_lengths=(6, 6, 6))
BACKBONES = {
    "dit": tiny_model(),
    "dit_cross": tiny_model("dit_cross"),
    "experts": tiny_model(num_experts=4),
    "flux": tiny_model(**{**FLUX, "num_joint_layers": 1, "num_single_layers": 2, "num_attention_heads": 4}),
    "unet": DDPMUNetConfig(block_out_channels=[8, 16], mid_out_channels=[16], hidden_size=32),
}


ALONE = ("one_rank", "fsdp_of_one_rank")
FEW = ("pp2", "fsdp", "one_rank")


@pytest.mark.parametrize(
    "name", rows([(name,) for name in CASES], lambda name: name in FEW, lambda name: name == "flux_fsdp")
)
def test_a_plan_equals_the_trace_of_the_full_step(one_tracer, name):
    (sizes, layout, micro_batches), ranks = CASES[name], 1 if name in ALONE else 2
    model, parallel = tiny_model(**{"hidden_size": 64, **sizes}), ParallelConfig(**layout)
    parts = (model, FlowMatching(), OptimizerConfig(), parallel, TrainingConfig(precision="fp32"), PACK)
    replicas = ranks // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    replicas //= parallel.context_parallel_size
    planned = plan(Job(*parts), ParallelDims(ranks, replicas, 1, micro_batches, 1)).ranks[0]
    (full,) = one_tracer([Job(*parts, world_size=ranks, micro_batches=micro_batches, in_full=True)])
    assert planned.flops == full.flops > 0
    assert planned.calls == full.calls
    assert planned.moved_bytes == pytest.approx(full.moved_bytes, rel=OF_PEAK)
    for kind, sent in full.sent_bytes.items():
        assert planned.sent_bytes[kind] == pytest.approx(sent, rel=OF_PEAK)
    for kind, amount in full.work.items():
        assert planned.work[kind] == pytest.approx(amount, rel=OF_PEAK)
    if "micro-batch" in planned.parts:  # products and attention are complete, a third of them in forward passes
        micro_batch, forward = planned.parts["micro-batch"], planned.parts["forward"]
        assert micro_batches * micro_batch.flops == full.flops
        assert 0.3 < forward.flops / micro_batch.flops < 0.35
    assert planned.live == pytest.approx(full.live, rel=OF_PEAK)
    assert planned.peak == pytest.approx(full.peak, rel=OF_PEAK)


def test_the_peak_of_a_plan_has_the_sums_of_dq_of_one_layer(one_tracer):
    """Every second layer has temporal attention; a stage of fewer layers may end with the other kind."""
    model = tiny_model("stdit", num_layers=24, hidden_size=128, num_attention_heads=2)
    parts = model, FlowMatching(), OptimizerConfig(), ParallelConfig(), TrainingConfig(precision="bf16")
    job = Job(*parts, PackShape(((4, 8, 8),), text_lengths=(4,)))
    planned = plan(job, ParallelDims(1, 1, 1, 1, 1)).ranks[0]
    (full,) = trace([replace(job, in_full=True)])
    assert planned.peak == pytest.approx(full.peak, rel=OF_PEAK)
    assert full.dq_bytes > 1.5 * OF_PEAK * full.peak


def test_the_groups_of_two_levels_of_context_parallelism_are_named(one_tracer):
    layout = ParallelConfig(context_parallel_size=4, context_comm="a2a+p2p", context_a2a_size=2)
    parts = tiny_model(num_layers=1), FlowMatching(), OptimizerConfig(), layout, TrainingConfig(precision="fp32")
    pack = PackShape(((1, 4, 8), (1, 4, 8)), text_lengths=(4, 4), multiple_of=4)
    (step,) = trace([Job(*parts, pack, world_size=4, in_full=True)])
    assert {("all_to_all", "cp_heads"), ("send", "cp_ring")} <= step.sent_bytes.keys()
    assert not any(group == "other" for _, group in step.sent_bytes)


def test_a_stage_without_adapters_makes_only_forward_passes(one_tracer):
    """Each of two stages has one layer; the first stage has adapters, or the second."""
    settings = OptimizerConfig(), ParallelConfig(pipeline_model_parallel_size=2), TrainingConfig(precision="fp32"), PACK
    models = [tiny_model(num_layers=2, lora=LoRAConfig(targets=[f"layers.{i}.*"])) for i in range(2)]
    jobs = [Job(model, FlowMatching(), *settings, world_size=2, micro_batches=2, in_full=True) for model in models]
    trained, frozen = one_tracer(jobs)
    assert 0 < frozen.flops < 0.6 * trained.flops


@pytest.mark.slow
def test_the_layers_that_are_traced_fill_the_window_of_fsdp(one_tracer):
    """The window has prefetched weights and pending gradients: 57 layers of FLUX in two sizes."""
    ranks, config = 8, built(call_recipe("flux_12b"))
    dims, _ = config.check(ranks)
    dims = replace(dims, micro_batches=min(dims.micro_batches, 4))
    parts = (config.model, config.objective, config.optimizer, config.parallel, config.training)
    pack = PackShape(((1, 64, 64),), text_lengths=(512,))
    planned = plan(Job(*parts, pack), dims).ranks[0]
    (full,) = one_tracer([Job(*parts, pack, world_size=ranks, micro_batches=dims.micro_batches, in_full=True)])
    assert planned.live == pytest.approx(full.live, rel=OF_PEAK)
    assert planned.peak == pytest.approx(full.peak, rel=OF_PEAK)


def test_an_earlier_trace_does_not_change_the_result():
    """The second of two traces in one process need not fill the caches, and gives the same result."""
    parts = tiny_model(num_layers=2), FlowMatching(), OptimizerConfig(), ParallelConfig(), TrainingConfig(), PACK
    first, second = trace([Job(*parts, fills_caches=fills) for fills in (True, False)])
    assert first.peak_bytes == pytest.approx(second.peak_bytes, abs=16)  # the first step leaves a number in memory
    assert replace(first, peak_bytes={}) == replace(second, peak_bytes={})
    assert first.host_syncs == 0


def test_a_traced_step_in_fp16_has_no_overflow():
    """Its update moves the bytes of bf16's and those of the search for overflows."""
    parts = tiny_model(num_layers=2), FlowMatching(), OptimizerConfig(), ParallelConfig()
    jobs = [Job(*parts, TrainingConfig(precision=name), PACK, fills_caches=False) for name in ("bf16", "fp16")]
    bf16, fp16 = (trace([job])[0].parts["update"].moved_bytes for job in jobs)
    assert bf16 < fp16 < 1.2 * bf16


def test_one_process_traces_layouts_one_after_another_without_warnings(capfd: pytest.CaptureFixture[str]):
    """A search traces all layouts in one process. A layout traced after others has the counts of a new process."""
    parts = tiny_model(num_layers=2), FlowMatching(), OptimizerConfig()
    sharded, split = (
        Job(*parts, ParallelConfig(**layout), TrainingConfig(), PACK, world_size=4)
        for layout in ({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True})
    )
    with Tracer() as tracer:
        tracer([sharded])
        (second,) = tracer([split])
        (process,) = tracer._pool._processes.values()
        assert process.is_alive()
    assert process.exitcode == 0
    (expected,) = trace([split])
    assert second.peak_bytes == pytest.approx(expected.peak_bytes, abs=16)  # the first job leaves a number in memory
    assert replace(second, peak_bytes={}) == replace(expected, peak_bytes={})
    assert "data pointer" not in capfd.readouterr().err


def refuse(job):
    raise ConfigError("the layer cannot be split")


def test_an_error_of_the_user_is_raised_and_has_no_traceback(capfd: pytest.CaptureFixture[str]):
    with Tracer() as tracer, pytest.raises(ConfigError, match="the layer cannot be split"):
        tracer.run(refuse, [None])
    assert capfd.readouterr().err == ""


def test_a_pool_answers_each_request_by_its_traces_and_reads_known_ones_from_disk(one_tracer, tmp_path, monkeypatch):
    """Two processes serve three requests of two calls each. A second pool only traces new jobs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parts = tiny_model(num_layers=1), FlowMatching(), OptimizerConfig(), ParallelConfig()

    def job(seed, micro_batches):
        return Job(*parts, TrainingConfig(seed=seed), PACK, micro_batches=micro_batches)

    def request(seed, trace):
        return trace([job(seed, 1)]) + trace([job(seed, 2), job(seed, 3)])

    def run(seeds):
        with Tracer(2) as tracer:
            return tracer.for_each(request, seeds)

    results = run([1, 2, 3])
    assert list(results) == [1, 2, 3]
    expected = one_tracer([job(1, 1)]) + one_tracer([job(1, 2), job(1, 3)])
    for steps in results.values():
        assert [step.flops for step in steps] == [step.flops for step in expected]
        assert [step.calls for step in steps] == [step.calls for step in expected]
    stored = sorted(tmp_path.rglob("*.json"))
    assert len(stored) == 6
    sent = []
    monkeypatch.setattr(Tracer, "run", lambda self, function, jobs: sent.append(jobs) or 1 / 0)
    assert run([1, 2, 3]) == results
    with pytest.raises(ZeroDivisionError):
        run([4])
    stored[0].write_text("[{}]")
    with pytest.raises(ZeroDivisionError):
        run([1, 2, 3])
    assert len(sent) == 2


@pytest.mark.parametrize("form", ["package", "module"])
def test_traces_of_another_package_are_stale_after_a_change_of_its_network(tmp_path, monkeypatch, form):
    """The network is not imported by the class of the settings, only named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = "from dit.models.dit.config import DiTConfig\nclass Config(DiTConfig):\n    model_path = '{}:Network'\n"
    package, network = f"backbone_in_a_{form}", tmp_path / f"network_of_a_{form}.py"
    if form == "package":
        network = tmp_path / package / "layers" / "network.py"
        network.parent.mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(settings.format(f"{package}.layers.network"))
    else:
        (tmp_path / f"{package}.py").write_text(settings.format(network.stem))
    network.write_text("DEPTH = 1\n")
    model = import_module(package).Config(hidden_size=32, num_layers=2, num_attention_heads=4)
    parts = FlowMatching(), OptimizerConfig(), ParallelConfig(), TrainingConfig()
    jobs, others = ([Job(each, *parts, PACK)] for each in (model, tiny_model(num_layers=2)))
    for of_jobs in (jobs, others):
        write_traces(of_jobs, [])
        assert read_traces(of_jobs) == []
    network.write_text("DEPTH = 2\n")
    trace_cache._sources.cache_clear()  # as in another process
    assert read_traces(jobs) is None
    assert read_traces(others) == []


@pytest.fixture
def traced_layers(monkeypatch):
    """Return a function that counts the layers traced by a recipe's dry run, once for each traced micro-batch."""
    traced = []

    def counted(jobs):
        for job in jobs:
            stage = job.rank * job.parallel.pipeline_model_parallel_size // job.world_size
            steady = steady_state(job.parallel, stage, job.world_size)
            micro_batches = steady.unit * job.fills_caches + min(job.micro_batches, steady.micro_batches)
            experts = (getattr(job.model, "num_experts", None) or 0) // job.parallel.expert_model_parallel_size
            layers = sum(len(stage.layers) for stage in job.stages)
            traced.append(layers * (1 + experts // EXPERTS) * micro_batches)
        return [StepTrace() for _ in jobs]

    def layers(recipe, ranks=None):
        config = built(call_recipe(recipe))
        dims, _ = config.check(ranks)
        traced.clear()
        parts = config.model, config.objective, config.optimizer, config.parallel, config.training
        plan(Job(*parts, PACK), dims)
        return sum(traced)

    monkeypatch.setattr("dit.planner.plan.trace", counted)
    return layers


@pytest.mark.parametrize(
    ("recipe", "ranks", "layers"),
    [
        # Three ranks trace 2 and 3 layers in 5, 4 and 3 micro-batches, and before them 1 layer in one micro-batch.
        ("pretrain_ditllama30b_stage3_mock_with_pp", 128, (2 + 3) * (5 + 4 + 3) + 1 + 1 + 1),
        # Layers of 0.18 B parameters over 2 ranks: 16 are unsharded at a time, so tracing 18 and 19 costs more than 32.
        ("mock_ditllama5b_8k", 8, 32 * 3 + 1),
        # 64 experts; a single rank shards nothing, and its micro-batches are alike.
        ("pretrain_ecditllama1b", 1, ((2 + 3) * 2 + 1) * (1 + 64 // EXPERTS)),
    ],
)
def test_a_dry_run_traces_few_layers(traced_layers, recipe, ranks, layers):
    """Tracing takes this number of layers times micro-batches, whatever the depth and the batch size."""
    assert traced_layers(recipe, ranks) == layers


def test_no_dry_run_traces_many_layers(traced_layers):
    """Bounds the time of `--dryrun`: tracing a layer takes a fraction of a second."""
    most = {entry.name: traced_layers(entry.name) for entry in registry.recipes()}
    assert max(most.values()) == MOST_LAYERS, max(most, key=lambda name: most[name])


def test_an_accelerators_rms_norm_saves_its_input_its_weight_and_a_number_per_row():
    """In bfloat16. torch's norm on CPU saves the input three times in float32."""
    saved = []

    def keep(tensor):
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    x = torch.zeros(6, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    with fused_rms_norm(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    y.sum().backward()
    assert saved == [((6, 8), torch.bfloat16), ((8,), torch.bfloat16), ((6, 1), torch.float32)]
    assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
    assert torch.nn.functional.rms_norm(torch.full((2,), 3.0), (2,)).tolist() == pytest.approx([1.0, 1.0])


def test_an_error_of_one_call_of_a_pool_ends_the_others(monkeypatch):
    failed, traced = threading.Event(), []
    monkeypatch.setattr("dit.planner.trace.read_traces", lambda jobs: traced.append(jobs) if failed.wait(1) else None)
    monkeypatch.setattr("dit.planner.trace.write_traces", lambda *_: None)

    def call(key, trace):
        if key == 1:
            failed.set()
            raise ConfigError("of the second call")
        for _ in range(2000):
            trace([])
            time.sleep(0.01)

    with Tracer(2) as tracer, pytest.raises(ConfigError, match="of the second call"):
        tracer.for_each(call, [0, 1])
    assert len(traced) < 500
