"""Candidates are priced from traces of a few layers: fast, and as a trace of the layout itself says."""

import time

import numpy as np
import pytest

from benchmarks.parallel_training import tiny_model
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.planner.devices import H100, MEMORY_SHARE
from dit.planner.layouts import Candidate, Problem, Shape, allowed, candidates, shapes
from dit.planner.plan import plan
from dit.planner.search import BYTES, Costs, Prices, costs, judged
from dit.planner.step import planned_step
from dit.planner.time import KINDS, Cluster
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.packs import PackShape

GRID, TEXT = (8, 32, 32), 256
OF_MEMORY, OF_TIME = 0.07, 0.03
MANY, SECONDS = 10_000, 5.0
PLAIN = Shape(2, True, 1, 1, "none")
EXACT = {
    "larger micro-batch": Candidate(PLAIN, 1, None, "distributed_optimizer", 4),
    "ddp": Candidate(PLAIN, 1, None, "ddp", 1),
    "pipeline": Candidate(PLAIN, 4, None, "distributed_optimizer", 1),
    "interleaved pipeline": Candidate(PLAIN, 2, 2, "distributed_optimizer", 1),
    "recomputed": Candidate(PLAIN, 1, None, "distributed_optimizer", 2, 1.0),
}
QUICK = ("pipeline", "recomputed")


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


@pytest.fixture(scope="module")
def priced():
    """Return what is to be trained, and prices from the one shape that all cases have."""
    task = problem()
    return task, Prices(task, {PLAIN: costs(task, PLAIN)})


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in EXACT]
)
def test_a_price_is_that_of_the_traced_layout(name, priced):
    """Time within 3 %, memory within 7 %: the slack of embeddings and head, which a price puts on every stage."""
    (task, prices), candidate = priced, EXACT[name]
    ((_, dims),) = allowed(task, iter([candidate])).found
    price = prices.of(candidate, dims)
    layout, training = candidate.parallel(task.parallel), candidate.training(task.training, 16)
    pack = task.pack_of(dims.micro_batch_size, dims.token_multiple)
    exact = plan(task.model, task.objective, task.optimizer, layout, training, pack, dims)
    step = planned_step(exact, dims, Cluster(task.device, task.world_size, layout))
    assert price.peak == pytest.approx(exact.fullest.peak, rel=OF_MEMORY)
    assert price.time.total == pytest.approx(step.time.total, rel=OF_TIME)


def made_up(shape):
    """Return costs of a shape: a second of everything, a gigabyte of everything."""
    return Costs(np.full((2, 2, 4, len(KINDS)), 1e-3), np.full((2, 2, len(BYTES)), 1e8 / shape.tensor), 32)


def test_ten_thousand_layouts_in_five_seconds():
    """Of the process: what it takes to check and to price them, once their shapes are traced."""
    task = problem(gpus=4096, num_layers=48, num_attention_heads=16)
    task = Problem(**{**vars(task), "tokens": 65_536, "training": TrainingConfig(global_batch_size=4096)})
    started = time.process_time()
    asked = list(candidates(task))
    found = allowed(task, iter(asked))
    prices = Prices(task, {shape: made_up(shape) for shape in shapes(found.found)})
    verdict = judged(task, [prices.of(candidate, dims) for candidate, dims in found.found])
    spent = time.process_time() - started
    assert len(asked) >= MANY
    assert len(verdict.fitting) + len(verdict.too_large) == len(found.found)
    assert spent / len(asked) * MANY < SECONDS


def test_a_verdict_orders_what_fits_and_says_why_the_others_lose():
    task = problem()
    shape = Shape(1, False, 1, 1, "none")
    found = allowed(task, candidates(task)).found
    prices = Prices(task, {each: made_up(each) for each in shapes(found)})
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


def test_what_the_settings_refuse_is_counted_by_its_reason():
    """Heads that tensor parallelism cannot split, a pipeline under FSDP, a batch that replicas cannot share."""
    task = problem(num_attention_heads=6, hidden_size=240)
    found = allowed(task, candidates(task))
    assert all(candidate.shape.tensor in (1, 2) for candidate, _ in found.found)
    assert any("num_attention_heads=6" in example for _, example in found.refused.values())
    assert any("data_parallel=fsdp cannot run with pipeline" in example for _, example in found.refused.values())
    asked = len(list(candidates(task)))
    assert sum(count for count, _ in found.refused.values()) + len(found.found) <= asked


def test_a_candidate_is_what_its_settings_say():
    candidate = Candidate(Shape(2, True, 4, 1, "none"), 2, 2, "distributed_optimizer", 4, 0.5)
    layout, training = candidate.parallel(ParallelConfig()), candidate.training(TrainingConfig(), 8)
    assert (layout.tensor_model_parallel_size, layout.context_parallel_size) == (2, 4)
    assert (layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size) == (2, 2)
    assert (training.recompute, training.recompute_layers, training.micro_batch_size) == ("full", 4, 4)
    assert ParallelDims(16, 1, 4, 4, 8).micro_batch_size == training.micro_batch_size
