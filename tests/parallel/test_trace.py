"""Compare a step traced on fake tensors with the same step on real gloo ranks."""

import pytest

from benchmarks.parallel_training import run_world
from dit.planner.trace import trace
from tests.parallel.trace_worker import job

pytestmark = pytest.mark.slow

WITHIN = 0.05  # relative error of live and peak memory
LAYOUTS = {
    "ddp": {"data_parallel": "ddp"},
    "distributed_optimizer": {},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2_ring": {"context_parallel_size": 2},
    "cp2_a2a": {"context_parallel_size": 2, "context_comm": "a2a"},
    "ep2": {"expert_model_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
}
MODELS = {"ep2": "experts", "pp2_vpp2": "deep"}
CASES = {
    **{name: {"model": MODELS.get(name, "dit"), "parallel": layout} for name, layout in LAYOUTS.items()},
    "unet": {"model": "unet", "parallel": LAYOUTS["ddp"]},
    "cross_bf16": {"model": "dit_cross", "parallel": LAYOUTS["tp2_sp"], "precision": "bf16"},
    "cross_recompute": {"model": "dit_cross", "parallel": LAYOUTS["ddp"], "recompute": "full"},
}
SENT = {  # names in `traffic.bytes_sent`
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "send": "p2p",
    "send shapes": "shapes",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the measurements of a real rank and the trace, for each case."""
    folder = tmp_path_factory.mktemp("world")
    worker = "tests.parallel.trace_worker:measure"
    cases = [{"task": worker, "folder": str(folder / name), **case} for name, case in CASES.items()]
    real = run_world(2, cases, folder, timeout_s=600)
    traced = trace([job(case, world_size=2) for case in CASES.values()])
    return dict(zip(CASES, zip(real, traced, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_traced_memory_equals_that_of_a_real_rank(results, name):
    real, traced = results[name]
    assert traced.live == pytest.approx(real["before"], rel=WITHIN)
    assert traced.peak == pytest.approx(real["peak"], rel=WITHIN)


@pytest.mark.parametrize("name", CASES)
def test_traced_operations_equal_those_of_torch(results, name):
    real, traced = results[name]
    assert traced.flops == real["flops"] > 0


@pytest.mark.parametrize("name", CASES)
def test_traced_bytes_sent_equal_those_of_a_real_rank(results, name):
    """Includes the data-parallel wrappers; the real rank does not count the sends of an interleaved pipeline."""
    real, traced = results[name]
    ((group, counted),) = real["sent"].items()
    sent = {SENT[kind]: n for (kind, g), n in traced.sent_bytes.items() if g == group and kind in SENT}
    if name == "pp2_vpp2":
        sent.pop("p2p")
    assert sent == dict(counted) != {}
