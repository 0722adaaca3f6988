"""Experts shared by ranks give the numbers of one rank: losses, norm, every gradient, weights and the load counters."""

import pytest

from tests.parallel.world import run_world

GRADIENT_RTOL = 1e-5  # fp32; sums are taken in another order
EP2 = {"expert_model_parallel_size": 2}
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ROUTERS = {
    "expert_choice": {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5},
    # A large coefficient, so that a balancing loss of the wrong scale would show.
    "top_k": {"num_experts": 4, "moe_router": "top_k", "moe_top_k": 2, "moe_aux_loss_coeff": 0.5},
}
LAYOUTS = {
    2: {
        "dp2": {"data_parallel": "ddp"},
        "ep2_ddp": {**EP2, "data_parallel": "ddp"},
        "ep2": EP2,
        "ep2_overlap": {**EP2, "overlap_grad_reduce": True, "overlap_param_gather": True},
        "tp2_sp": TP2SP,
        "ep2_tp2_sp": {**EP2, **TP2SP},
    },
    4: {
        "ep2_dp4": EP2,
        "ep4": {"expert_model_parallel_size": 4},
        "ep2_tp2_sp": {**EP2, **TP2SP},
        "ep4_tp2_sp_ddp": {"expert_model_parallel_size": 4, **TP2SP, "data_parallel": "ddp"},
    },
}
BATCHES = [(router, packed) for router in ROUTERS for packed in (False, True)]
CASES = [(world, name, *batch) for world, named in LAYOUTS.items() for name in named for batch in BATCHES]


def case(parallel: dict, router: str, packed: bool) -> dict:
    return {"parallel": parallel, "packed": packed, "model": ROUTERS[router]}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every case's numbers, and those of one rank; each world size starts once."""
    folder = tmp_path_factory.mktemp("worlds")
    one = [case({"data_parallel": "ddp"}, *batch) for batch in BATCHES]
    found = dict(zip([("one", *batch) for batch in BATCHES], run_world(1, one, folder / "1")))
    for world, named in LAYOUTS.items():
        keys = [(world, name, *batch) for name in named for batch in BATCHES]
        cases = [case(named[name], *batch) for _, name, *batch in keys]
        found |= dict(zip(keys, run_world(world, cases, folder / str(world))))
    return found


@pytest.mark.parametrize(("world", "name", "router", "packed"), CASES)
def test_layout_equals_one_rank(results, world, name, router, packed):
    one, many = results["one", router, packed], results[world, name, router, packed]
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert many["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-5)
    assert many["gradients"].keys() == one["gradients"].keys()
    assert {f"layers.1.mlp.experts.{i}.linear_fc1.weight" for i in range(4)} <= one["gradients"].keys()
    for parameter, expected in one["gradients"].items():
        error = (many["gradients"][parameter] - expected).norm() / expected.norm()
        assert expected.norm() > 0, f"{parameter} has no gradient, so the comparison shows nothing"
        assert error <= GRADIENT_RTOL, f"{parameter}: relative gradient error {error:.2e}"
    for parameter, expected in one["parameters"].items():
        error = (many["parameters"][parameter] - expected).norm() / expected.norm()
        assert error <= 1e-4, f"{parameter}: relative error {error:.2e} after three steps"
    assert many["drifted"] == []
    assert many["expert_load"] == pytest.approx(one["expert_load"], rel=1e-5)
    assert len(one["expert_load"]) == 4 * (3 if router == "expert_choice" else 4)
