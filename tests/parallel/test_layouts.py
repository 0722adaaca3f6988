"""Any layout gives the numbers of one rank, for every parameter's gradient."""

import pytest

from tests.parallel.world import run_world

GRADIENT_RTOL = 1e-5  # fp32; sums are taken in another order
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    2: {
        "dp2": {"data_parallel": "ddp"},
        "distributed_optimizer2": {},
        "distributed_optimizer2_overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        "tp2": {"tensor_model_parallel_size": 2},
        "tp2_sp": TP2SP,
    },
    4: {
        "tp2_sp_distributed_optimizer2": TP2SP,
        "tp4_sp": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    },
}
CASES = [(world, name, packed) for world, named in LAYOUTS.items() for name in named for packed in (False, True)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every case's numbers, and those of one rank; each world size starts once."""
    folder = tmp_path_factory.mktemp("worlds")
    found = {}
    one = [{"parallel": {"data_parallel": "ddp"}, "packed": packed} for packed in (False, True)]
    for packed, result in zip((False, True), run_world(1, one, folder / "1")):
        found["one", packed] = result
    for world, named in LAYOUTS.items():
        keys = [(name, packed) for name in named for packed in (False, True)]
        cases = [{"parallel": named[name], "packed": packed} for name, packed in keys]
        found |= dict(zip(keys, run_world(world, cases, folder / str(world))))
    return found


def assert_equal_training(one: dict, many: dict) -> None:
    """Compare what `worker.train` reports of one rank and of a layout."""
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert many["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-5)
    assert many["gradients"].keys() == one["gradients"].keys()
    for parameter, expected in one["gradients"].items():
        error = (many["gradients"][parameter] - expected).norm() / expected.norm()
        assert expected.norm() > 0, f"{parameter} has no gradient, so the comparison shows nothing"
        assert error <= GRADIENT_RTOL, f"{parameter}: relative gradient error {error:.2e}"
    for parameter, expected in one["parameters"].items():
        error = (many["parameters"][parameter] - expected).norm() / expected.norm()
        assert error <= 1e-4, f"{parameter}: relative error {error:.2e} after three steps"
    assert many["drifted"] == []


@pytest.mark.parametrize(("world", "name", "packed"), CASES)
def test_layout_equals_one_rank(results, world, name, packed):
    assert_equal_training(results["one", packed], results[name, packed])
