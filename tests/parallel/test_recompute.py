"""Activation recompute changes no number on any layout."""

import pytest

from benchmarks.parallel_world import run_world
from tests.support.ranks import selected
from tests.support.reference import assert_equal_training

pytestmark = pytest.mark.slow

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5}
LAYOUTS = {
    "tp2_sp": TP2SP,
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2_ring": {"context_parallel_size": 2},
    "distributed_optimizer2_overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "fsdp2": {"data_parallel": "fsdp"},
    "ep2": {"expert_model_parallel_size": 2},
}
KINDS = {
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "full_one_layer": {"recompute": "full", "recompute_layers": 1},
}
CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS]
ROW = ("layout", "kind")


def model_of(layout):
    return EXPERTS if layout == "ep2" else {}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Results of each selected layout and kind on packed batches, and of one rank without recompute."""
    folder, wanted = tmp_path_factory.mktemp("worlds"), [case for case in CASES if case in selected(request, ROW)]
    alone = [{"parallel": {"data_parallel": "ddp"}, "packed": True, "model": model} for model in ({}, EXPERTS)]
    one, experts = run_world(1, alone, folder / "1")
    cases = [
        {"parallel": LAYOUTS[layout], "packed": True, "model": model_of(layout), "recompute": KINDS[kind]}
        for layout, kind in wanted
    ]
    found = dict(zip(wanted, run_world(2, cases, folder / "2")))
    return {**found, **{(layout, "none"): experts if layout == "ep2" else one for layout in LAYOUTS}}


@pytest.mark.parametrize(ROW, CASES)
def test_recompute_equals_one_rank_without_recompute(results, layout, kind):
    assert_equal_training(results[layout, "none"], results[layout, kind])
    assert results[layout, kind]["expert_load"] == pytest.approx(results[layout, "none"]["expert_load"])
