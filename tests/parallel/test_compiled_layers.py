"""Compiled layers compute the numbers of eager layers on one rank, on every layout that supports them."""

import pytest

from benchmarks.parallel_world import run_world
from dit.kernels import compiled
from tests.support.ranks import rows, selected
from tests.support.reference import assert_equal_training

LAYOUTS = {
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "distributed_optimizer2": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
MODELS = {
    **{"dit": {"num_layers": 2}, "dit_cross": {"backbone": "dit_cross"}, "wan": {"backbone": "wan"}},
    "values": {"num_layers": 3, "value_residual": True},
}
CASES = [
    *(("tp2_sp", "dit", True), ("tp2", "wan", True), ("pp2", "dit_cross", True), ("cp2", "dit", False)),
    *(("distributed_optimizer2", "dit", True), ("tp2", "values", True)),
]
ROW = ("layout", "name", "packed")
QUICK = {("tp2_sp", "dit", True)}


def as_operators(chunks: object) -> None:
    """Run compiled graphs with torch's operators, because code generation takes minutes."""
    compiled.BACKEND = "aot_eager"


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Each selected case, compiled on two ranks and eager on one rank."""
    folder = tmp_path_factory.mktemp("worlds")
    wanted = [case for case in CASES if case in selected(request, ROW)]
    kinds = sorted({case[1:] for case in wanted})
    alone = [{"parallel": {"data_parallel": "ddp"}, "packed": packed, "model": MODELS[name]} for name, packed in kinds]
    one = dict(zip(kinds, run_world(1, alone, folder / "1")))
    cases = [
        {
            "parallel": LAYOUTS[layout],
            "packed": packed,
            "model": MODELS[name],
            "recompute": {"kernels": "compile"},
            "break": as_operators,
        }
        for layout, name, packed in wanted
    ]
    many = dict(zip(wanted, run_world(2, cases, folder / "2")))
    return {case: (one[case[1:]], many[case]) for case in wanted}


@pytest.mark.parametrize(ROW, rows(CASES, lambda *case: case in QUICK))
def test_compiled_layers_on_two_ranks_equal_eager_layers_on_one_rank(results, layout, name, packed):
    assert_equal_training(*results[layout, name, packed])
