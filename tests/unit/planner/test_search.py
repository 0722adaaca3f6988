"""Candidates are priced from traces of a few layers: fast, and close to a trace of the full layout."""

import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.parallel_training import tiny_model
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import build_on_meta
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.planner.devices import H100, MEMORY_SHARE
from dit.planner.job import Job
from dit.planner.layouts import Candidate, Problem, Shape, allowed, candidates, shapes
from dit.planner.plan import plan, planned_step
from dit.planner.search import B_ACTIVATIONS, BYTES, Costs, Prices, costs, judged, price_layouts
from dit.planner.time import MICRO_BATCH, ONCE, Cluster, Kind, step_time
from dit.planner.trace import Tracer
from dit.run_config import RunConfig
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.packs import PackShape
from energon_data.mock import MockData
from tests.support.ranks import rows

pytestmark = pytest.mark.usefixtures("one_tracer")

GRID, TEXT = (8, 32, 32), 256
OF_MEMORY, OF_TIME = 0.07, 0.04
OF_SMALL = 0.01
"""Of time and of memory, where the micro-batch itself was traced."""
MANY, SECONDS = 10_000, 12.0
PLAIN = Shape(2, True, 1, 1, "none")
EXACT = {
    "larger micro-batch": Candidate(PLAIN, 1, None, "distributed_optimizer", 4),
    "ddp": Candidate(PLAIN, 1, None, "ddp", 1),
    "pipeline": Candidate(PLAIN, 4, None, "distributed_optimizer", 1),
    "interleaved pipeline": Candidate(PLAIN, 2, 2, "distributed_optimizer", 1),
    "recomputed": Candidate(PLAIN, 1, None, "distributed_optimizer", 2, 1.0),
}
ALONE = Shape(1, False, 1, 1, "none")


def problem(gpus=64, **sizes):
    model = tiny_model(**{"hidden_size": 2048, "num_layers": 16, "num_attention_heads": 16, **sizes})
    return Problem(
        model,
        FlowMatching(),
        OptimizerConfig(),
        ParallelConfig(),
        TrainingConfig(ema_decay=None, global_batch_size=512),
        lambda samples, multiple: PackShape((GRID,) * samples, (TEXT,) * samples, multiple),
        8192,
        gpus,
        H100,
    )


def small(gpus=8):
    """Return a problem with samples of 16 tokens, of which hundreds fit in a micro-batch."""
    sizes = {"hidden_size": 1024, "num_layers": 8, "num_attention_heads": 16, "in_channels": 4, "patch_spatial": 2}
    return Problem(
        DiTConfig(**sizes, num_classes=10),
        FlowMatching(),
        OptimizerConfig(),
        ParallelConfig(),
        TrainingConfig(ema_decay=None, global_batch_size=4096),
        lambda samples, multiple: PackShape(((1, 4, 4),) * samples, (), multiple),
        16,
        gpus,
        H100,
    )


@pytest.fixture(scope="module")
def tracers(tmp_path_factory):
    """Trace all costs of the module in one process, without known traces; another process traces the plans."""
    with pytest.MonkeyPatch.context() as patch, Tracer() as tracers:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield tracers


def traced_costs(tracers, task, shape, found=()):
    return tracers.for_each(lambda shape, trace: costs(task, shape, trace, found), [shape])


@pytest.fixture(scope="module")
def priced(tracers):
    """Return a problem, and prices from the one shape that all cases have."""
    task = problem()
    return task, Prices(task, traced_costs(tracers, task, PLAIN))


@pytest.mark.parametrize(
    "name", rows([(name,) for name in EXACT], lambda name: name == "recomputed", lambda name: name == "pipeline")
)
def test_interpolated_costs_equal_the_traced_layout(name, priced):
    """Time within 4 %, memory within 7 %, because a price puts embeddings and head on every stage."""
    (task, prices), candidate = priced, EXACT[name]
    ((_, dims),) = allowed(task, iter([candidate])).layouts
    price = prices.of(candidate, dims)
    layout, training = candidate.parallel(task.parallel), candidate.training(task.training, 16)
    pack = task.pack_of(dims.micro_batch_size, dims.token_multiple)
    exact = plan(Job(task.model, task.objective, task.optimizer, layout, training, pack), dims)
    step = planned_step(exact, dims, Cluster(task.device, task.world_size, layout))
    assert price.peak == pytest.approx(exact.fullest.peak, rel=OF_MEMORY)
    assert price.time.total == pytest.approx(step.total, rel=OF_TIME)


def compared(tracers, task, size):
    """Return traced sizes, the price of a micro-batch of `size` samples, and the result of tracing the layout."""
    candidate = Candidate(ALONE, 1, None, "distributed_optimizer", size)
    ((candidate, dims),) = found = allowed(task, iter([candidate])).layouts
    traced = traced_costs(tracers, task, ALONE, found)
    price = Prices(task, traced).of(candidate, dims)
    parts = candidate.parallel(task.parallel), candidate.training(task.training, 1)
    exact = plan(Job(task.model, task.objective, task.optimizer, *parts, task.pack_of(size, dims.token_multiple)), dims)
    step = planned_step(exact, dims, Cluster(task.device, task.world_size, parts[0]))
    return traced[ALONE].sizes, (price.time.total, price.peak), (step.total, exact.fullest.peak)


@pytest.mark.long
def test_costs_of_unet_pictures_equal_a_trace(tracers):
    """The second picture adds operations that further ones do not, so one and two cannot be extrapolated to four."""
    task = replace(
        small(),
        model=DDPMUNetConfig(block_out_channels=[8, 16], mid_out_channels=[16], hidden_size=32),
        pack_of=lambda samples, multiple: PackShape(((1, 16, 16),) * samples, (), multiple),
    )
    sizes, price, exact = compared(tracers, task, 4)
    assert sizes == (1, 2, 4)
    assert price == pytest.approx(exact, rel=OF_SMALL)


@pytest.mark.slow
def test_costs_of_hundreds_of_small_samples_equal_a_trace(tracers):
    """Products with one row per sample take the time of reading their weights, until there are many rows."""
    sizes, price, exact = compared(tracers, small(), 128)
    assert sizes == (1, 2, 4, 8, 16, 32, 64, 128)
    assert price == pytest.approx(exact, rel=OF_SMALL)


@pytest.mark.parametrize(("tokens", "expected"), [(16, [1, 2, 4, 8, 16]), (8192, [1, 2, 16]), (4096, [1, 2, 4, 16])])
def test_only_sizes_that_fit_are_traced(tokens, expected, monkeypatch: pytest.MonkeyPatch):
    """Micro-batches double up to 16,384 tokens, then grow eightfold; the last size is the largest that fits."""
    task, traced_sizes = replace(small(), tokens=tokens), []
    limit = MEMORY_SHARE * H100.memory_bytes

    def traced(_, shape, sizes, trace):
        traced_sizes.extend(sizes)
        nbytes = np.zeros((2, len(sizes), len(BYTES)))
        nbytes[0, :, B_ACTIVATIONS] = [size * limit / 20 for size in sizes]
        return Costs(np.full((2, len(sizes), 4, len(Kind)), 1e-3), nbytes, 8, sizes)

    monkeypatch.setattr("dit.planner.search._traced", traced)
    many = [Candidate(ALONE, 1, None, "distributed_optimizer", size) for size in (1, 2, 4, 8, 16, 32, 64)]
    found = allowed(task, iter(many)).layouts
    for shape, sizes in ((ALONE, expected), (Shape(2, True, 1, 1, "none"), [1, 2])):
        traced_sizes.clear()
        costs(task, shape, None, found)
        assert traced_sizes == sizes


@pytest.mark.parametrize(("samples", "expected"), [(1, 10.0), (2, 12.0), (3, 13.0), (4, 14.0), (6, 30.0), (16, 110.0)])
def test_costs_are_interpolated_linearly_between_traced_micro_batches(samples: int, expected: float):
    values = np.array([10.0, 12.0, 14.0, 46.0])
    seconds = np.zeros((2, 4, 4, len(Kind)))
    nbytes = np.zeros((2, 4, len(BYTES)))
    seconds[0, :, 0, 0], nbytes[1, :, 0] = values, values
    found = Costs(seconds[:, :3], nbytes[:, :3], 1, (1, 2, 4)).and_then(Costs(seconds[:, 3:], nbytes[:, 3:], 1, (8,)))
    of_stage, of_bytes = found.of(5.0, samples)
    assert of_stage[0, 0] == expected
    assert of_bytes[0] == 5.0 * expected


def synthetic_costs(shape):
    """Return synthetic costs of a shape: a millisecond for everything, and equal bytes."""
    return Costs(np.full((2, 2, 4, len(Kind)), 1e-3), np.full((2, 2, len(BYTES)), 1e8 / shape.tensor), 32)


def test_ten_thousand_layouts_take_at_most_twelve_seconds():
    """Processor time to check and price traced layouts, measured with an eighth of them; seven on a busy core."""
    task = problem(gpus=4096, num_layers=48, num_attention_heads=16)
    data = MockData(frames=64, height=64, width=64, text_tokens=TEXT)
    run = RunConfig(model=task.model, data=data, objective=task.objective)
    task = replace(
        task,
        tokens=65_536,
        training=TrainingConfig(global_batch_size=4096),
        check=lambda parallel, training: replace(run, parallel=parallel, training=training).check(4096)[0],
    )
    started = time.process_time()
    every = list(candidates(task))
    asked = every[::8]
    found = allowed(task, iter(asked))
    prices = Prices(task, {shape: synthetic_costs(shape) for shape in shapes(found.layouts)})
    verdict = judged(task, [prices.of(candidate, dims) for candidate, dims in found.layouts])
    spent = time.process_time() - started
    assert len(every) >= MANY
    assert len(found.layouts) > MANY / 80
    assert len(verdict.fitting) + len(verdict.too_large) == len(found.layouts)
    assert spent / len(asked) * MANY < SECONDS


class SyntheticTracers:
    """Returns synthetic costs of all requested shapes, whose products take `seconds(shape)` per sample and layer."""

    def __init__(self, seconds):
        self.seconds, self.traced = seconds, []

    def for_each(self, function, shapes):
        self.traced += shapes
        return {shape: self.costs(shape) for shape in shapes}

    def costs(self, shape):
        empty = synthetic_costs(shape)
        seconds = np.zeros_like(empty.seconds)
        seconds[1, :, MICRO_BATCH, Kind.MATMUL] = [size * self.seconds(shape) for size in empty.sizes]
        seconds[1, :, MICRO_BATCH, Kind.GATHER] = 1.0 if shape.fsdp else 0.0
        return replace(empty, seconds=seconds)


@pytest.mark.parametrize(
    ("loss", "traced"),
    [
        (0.0, {(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (8, 2), (4, 4), (8, 4)}),
        (0.5, {(1, 1), (2, 1), (1, 2)}),
    ],
)
def test_shapes_that_cannot_be_the_fastest_are_not_traced(loss, traced):
    """Without a loss, more tensor and context parallelism divides the passes exactly, and every shape may win.

    With a loss of 50 % per doubling, shapes of two ranks are traced, which have no traced part that shows their loss,
    and no larger ones. The slow exchanges of FSDP do not count in the lower bound, but its plain shape does.
    """
    task = problem(gpus=32)
    found = allowed(task, candidates(task)).layouts
    tracers = SyntheticTracers(
        lambda shape: (1 + loss * np.log2(shape.tensor * shape.context)) / shape.tensor / shape.context
    )
    results, not_traced = price_layouts(task, found, tracers, lambda _: None)
    assert {(shape.tensor, shape.context) for shape in tracers.traced if not shape.fsdp} == traced
    assert (Shape(2, True, 1, 1, "none", fsdp=True) in tracers.traced) == (not loss)
    assert len(results) + len(not_traced) == len(found)
    every = Prices(task, {shape: tracers.costs(shape) for shape in shapes(found)})
    best = judged(task, [every.of(*pair) for pair in found]).fitting[0]
    assert judged(task, results).fitting[0].time.total == best.time.total


def test_the_result_sorts_layouts_that_fit_and_explains_the_others():
    task = problem()
    shape = Shape(1, False, 1, 1, "none")
    found = allowed(task, candidates(task)).layouts
    prices = Prices(task, {each: synthetic_costs(each) for each in shapes(found)})
    verdict = judged(task, [prices.of(candidate, dims) for candidate, dims in found])
    times = [one.time.total for one in verdict.fitting]
    assert times == sorted(times)
    limit = MEMORY_SHARE * H100.memory_bytes
    assert max(one.peak for one in verdict.fitting) <= limit < min(one.peak for one in verdict.too_large)
    losers = [one for group in verdict.by_loss().values() for one in group]
    assert len(losers) == len(verdict.fitting) - 1
    for item, group in verdict.by_item().items():
        assert all(one.memory[item] == max(one.memory.values()) for one in group)
    assert shape in shapes(found)


def test_refused_layouts_are_counted_by_reason():
    """Heads that tensor parallelism cannot split, a batch that replicas cannot share."""
    task = problem(num_attention_heads=6, hidden_size=240)
    found = allowed(task, candidates(task))
    assert all(candidate.shape.tensor in (1, 2) for candidate, _ in found.layouts)
    assert any("num_attention_heads=6" in example for _, example in found.refused.values())
    asked = len(list(candidates(task)))
    assert sum(count for count, _ in found.refused.values()) + len(found.layouts) <= asked


def test_a_candidate_has_the_layout_of_its_settings():
    candidate = Candidate(Shape(2, True, 4, 1, "none"), 2, 2, "distributed_optimizer", 4, 0.5)
    layout, training = candidate.parallel(ParallelConfig()), candidate.training(TrainingConfig(), 8)
    assert (layout.tensor_model_parallel_size, layout.context_parallel_size) == (2, 4)
    assert (layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size) == (2, 2)
    assert (training.recompute, training.recompute_layers, training.micro_batch_size) == ("full", 4, 4)
    assert ParallelDims(16, 1, 4, 4, 8).micro_batch_size == training.micro_batch_size


def test_recomputed_shares_are_of_complete_layers():
    """Of a chunk of three layers, thirds; of a chunk of one layer, none or all."""
    shares = {}
    for candidate in candidates(problem(num_layers=6)):
        if candidate.chunks is None:
            shares.setdefault(candidate.pipeline, set()).add(candidate.recomputed)
            layers = 6 // candidate.pipeline
            training = candidate.training(TrainingConfig(), layers)
            recomputed = 0 if training.recompute == "none" else training.recompute_layers or layers
            assert candidate.recomputed == recomputed / layers
    assert shares == {1: {0, 2 / 6, 3 / 6, 5 / 6, 1}, 2: {0, 1 / 3, 2 / 3, 1}, 4: {0, 1}}


def test_launches_of_an_update_do_not_grow_with_the_number_of_replicas():
    """A replicated optimizer moves more bytes than a sharded one, with the same number of operations."""
    task = problem(gpus=512)  # 256 replicas
    seconds = np.full((2, 2, 4, len(Kind)), 1e-3)
    seconds[..., Kind.EXPERT] = 0.0  # only Muon exchanges matrices in an update
    prices = Prices(task, {PLAIN: Costs(seconds, np.full((2, 2, len(BYTES)), 1e6), 256)})
    times = {}
    for kind in ("distributed_optimizer", "ddp"):
        ((candidate, dims),) = allowed(task, iter([Candidate(PLAIN, 1, None, kind, 1)])).layouts
        times[kind] = prices.of(candidate, dims).time.parts["optimizer"]
    layers = 1e-3 * (1 + task.model.megatron_sizes().num_layers)
    assert times["ddp"] - times["distributed_optimizer"] == pytest.approx(255 * layers)


def fsdp_candidate(instances):
    return Candidate(Shape(1, False, 1, 1, "none", True, instances), 1, None, "fsdp", 1)


def test_instances_cost_the_memory_of_one_and_one_reduction_over_the_network():
    """Two nodes with an instance each: weights and gradients use NVLink, only the sum of shards uses the network."""
    task = problem(num_layers=4, hidden_size=256)
    ranks = {}
    for world, instances in ((8, 1), (16, 2)):
        ((candidate, dims),) = allowed(replace(task, world_size=world), iter([fsdp_candidate(instances)])).layouts
        dims = replace(dims, micro_batches=4)
        layout, pack = candidate.parallel(task.parallel), task.pack_of(1, dims.token_multiple)
        parts = task.model, task.objective, task.optimizer, layout, task.training, pack
        ranks[instances] = plan(Job(*parts), dims).ranks[0]
    node, hybrid = ranks[1], ranks[2]
    assert hybrid.state_bytes == node.state_bytes
    assert hybrid.peak == node.peak
    for collective in ("all_gather", "reduce_scatter"):
        assert hybrid.sent_bytes[collective, "intra_dp_cp"] == node.sent_bytes[collective, "dp"] > 0
    shard = 4 * sum(p.numel() for p in build_on_meta(task.model).parameters()) / 8
    assert node.state_bytes["optimizer"] == pytest.approx(2 * shard, rel=0.01)  # without gathered weights
    reduced = hybrid.sent_bytes["all_reduce", "inter_dist_opt"]
    assert shard <= reduced <= 1.01 * shard  # 2 (n - 1) / n of it, and padding; for one of four micro-batches
    assert not any(group == "inter_dist_opt" for _, group in hybrid.parts["micro-batch"].sent_bytes)


def test_fsdp_with_pipeline_stages_has_the_costs_of_its_trace(tracers):
    """A stage fills a node: its eight ranks shard its state, and exchange over NVLink instead of the network."""
    task = replace(problem(64, num_layers=8, hidden_size=1024), device=replace(H100, nic=H100.nic / 8))
    wanted = Candidate(Shape(1, False, 1, 1, "none", True), 8, None, "fsdp", 1)
    ((candidate, dims),) = (found for found in allowed(task, candidates(task)).layouts if found[0] == wanted)
    price = Prices(task, traced_costs(tracers, task, candidate.shape)).of(candidate, dims)
    layout, pack = candidate.parallel(task.parallel), task.pack_of(1, dims.token_multiple)
    exact = plan(Job(task.model, task.objective, task.optimizer, layout, task.training, pack), dims)
    for name, nbytes in exact.ranks[1].state_bytes.items():
        assert price.memory[name] == pytest.approx(nbytes, rel=0.1)
    assert price.peak == pytest.approx(exact.fullest.peak, rel=OF_MEMORY)
    step = planned_step(exact, dims, Cluster(task.device, task.world_size, layout))
    assert price.time.total == pytest.approx(step.total, rel=OF_TIME)


@pytest.mark.parametrize(
    ("gpus", "device", "node_size", "searched"),
    [
        (64, H100, 8, {(1, 1), (2, 1), (2, 8)}),  # four NICs of a node are slower than NVLink, eight are not
        (64, replace(H100, nic=H100.nic / 2), 8, {(1, 1), (1, 8), (2, 1), (2, 8)}),
        (8, H100, 8, {(1, 1), (2, 1)}),
        (64, H100, 2, {(1, 1), (1, 32), (2, 1)}),  # two tensor-parallel ranks fill a node
    ],
)
def test_fsdp_inside_a_node_is_searched_if_a_ring_over_nodes_is_slower(gpus, device, node_size, searched):
    task = replace(problem(gpus), device=replace(device, node_size=node_size))
    fsdp = {candidate for candidate, _ in allowed(task, candidates(task)).layouts if candidate.shape.fsdp}
    assert {(one.shape.tensor, one.shape.instances) for one in fsdp if one.shape.context == 1} == searched
    for one in fsdp:
        assert one.parallel(task.parallel).num_distributed_optimizer_instances == one.shape.instances


@pytest.mark.parametrize("gpus", [12, 20])
def test_no_instances_are_searched_if_a_node_is_not_full(gpus):
    """Instances of equal size would cross nodes, or there would be one instance, which is FSDP over all ranks."""
    task = replace(problem(gpus), device=replace(H100, nic=H100.nic / 8))
    found = list(candidates(task))
    assert {one.shape.instances for one in found if one.shape.fsdp} == {1}
    assert len(found) == len(set(found))


def test_instances_are_faster_by_saved_network_traffic():
    """By hand: 64 GB gathered per micro-batch, 4 GB sent once over the network, half a second of other work."""
    device = replace(H100, nic=H100.nic / 8)
    sent = {
        1: {("all_gather", "dp_cp"): 64e9},
        8: {("all_gather", "intra_dp_cp"): 64e9, ("all_reduce", "inter_dist_opt"): 4e9},
    }
    exposed = {}
    for instances, nbytes in sent.items():
        layout = fsdp_candidate(instances).parallel(ParallelConfig())
        cluster = Cluster(device, 64, layout)
        cost = np.zeros((4, len(Kind)))
        cost[:2, Kind.MATMUL] = 0.5, 0.2
        for (collective, group), count in nbytes.items():
            row, kind = (ONCE, Kind.REDUCE) if collective == "all_reduce" else (MICRO_BATCH, Kind.GATHER)
            cost[row, kind] = cluster.seconds(group, count, 0)
        exposed[instances] = step_time(cost, 4, cluster).parts["data parallel"]
    ring, inside, across = 64e9 / (8 * device.nic), 64e9 / device.nvlink, 4e9 / device.nic
    slowdown = device.fitted.interference  # per second of hidden exchange
    assert exposed[1] == pytest.approx(4 * (ring - 0.5 + slowdown * 0.5))
    backward = 0.5 + slowdown * inside - 0.2
    assert exposed[8] == pytest.approx(4 * slowdown * inside + across - backward + slowdown * backward)
    assert exposed[8] < exposed[1]
