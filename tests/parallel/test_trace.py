"""A step traced on fake tensors against the same step on real gloo ranks."""

import pytest

from benchmarks.parallel_world import run_world
from dit.planner.trace import StepTrace, trace
from tests.parallel.trace_worker import job

WITHIN = 0.05  # what the peak may differ by
LAYOUTS = {
    "ddp": {"data_parallel": "ddp"},
    "distributed_optimizer": {},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2_ring": {"context_parallel_size": 2},
    "cp2_a2a": {"context_parallel_size": 2, "context_comm": "a2a"},
    "fsdp2": {"data_parallel": "fsdp"},
    "ep2": {"expert_model_parallel_size": 2},
}
MODELS = {"ep2": "experts", "pp2_vpp2": "deep"}
CASES = {
    **{name: {"model": MODELS.get(name, "dit"), "parallel": layout} for name, layout in LAYOUTS.items()},
    "cross_bf16": {"model": "dit_cross", "parallel": LAYOUTS["tp2_sp"], "precision": "bf16"},
    "cross_recompute": {"model": "dit_cross", "parallel": LAYOUTS["ddp"], "recompute": "full"},
}
SENT = {  # as the traffic tests name what they count
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "send": "p2p",
    "send shapes": "shapes",
}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    cases = [
        {"task": "tests.parallel.trace_worker:measure", "folder": str(folder / name), **case}
        for name, case in CASES.items()
    ]
    return dict(zip(CASES, run_world(2, cases, folder, timeout_s=600)))


@pytest.fixture(scope="module")
def traced() -> dict[str, StepTrace]:
    found = trace([job(case, world_size=2) for case in CASES.values()])
    return {name: steps[0] for name, steps in zip(CASES, found)}


FSDP_GAP = pytest.mark.xfail(strict=True, reason="under Megatron-FSDP more bytes are counted than a real rank holds")


@pytest.mark.parametrize("name", [pytest.param(name, marks=FSDP_GAP) if name == "fsdp2" else name for name in CASES])
def test_memory_is_that_of_a_real_rank(real, traced, name):
    assert traced[name].live == pytest.approx(real[name]["before"], rel=WITHIN)
    assert traced[name].peak == pytest.approx(real[name]["peak"], rel=WITHIN)


@pytest.mark.parametrize("name", CASES)
def test_operations_are_those_of_torch(real, traced, name):
    assert traced[name].flops == real[name]["flops"] > 0


@pytest.mark.parametrize("name", CASES)
def test_bytes_sent_are_those_of_a_real_rank(real, traced, name):
    for group, counted in real[name]["sent"].items():
        sent = {SENT[kind]: n for (kind, g), n in traced[name].sent_bytes.items() if g == group and kind in SENT}
        counted = {kind: n for kind, n in counted.items() if n}  # not DDP's collectives, nor unbatched sends
        assert counted
        assert {kind: sent[kind] for kind in counted} == counted
