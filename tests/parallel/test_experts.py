"""Expert parallelism computes the numbers of one rank: losses, norms, gradients, weights, load and checkpoints."""

import pytest
import torch

from benchmarks.parallel_world import run_world
from tests.support.ranks import rows, selected
from tests.support.reference import assert_equal_training

EP2, EP4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2, CP2 = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
DDP = {"data_parallel": "ddp"}
ROUTERS = {
    "expert_choice": {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5},
    # The coefficient is large, so that a balancing loss of the wrong scale changes the gradients.
    "top_k": {"num_experts": 4, "moe_router": "top_k", "moe_top_k": 2, "moe_aux_loss_coeff": 0.5},
}
BOTH = [("expert_choice", True), ("top_k", True)]
BATCHES = [(router, packed) for router in ROUTERS for packed in (False, True)]
# As EC-DiT-1B: text, and experts with gated MLPs.
ROUTERS["moviegen"] = {**ROUTERS["expert_choice"], "backbone": "moviegen", "num_query_groups": 2, "max_grid": [4, 5, 6]}
MOVIEGEN = [("moviegen", True)]
# (ranks, name): (layout, batches)
LAYOUTS = {
    (2, "ep2"): (EP2, BATCHES),
    (2, "ep2_ddp"): (EP2 | DDP, [("top_k", True)]),
    (2, "ep2_overlap"): (EP2 | OVERLAP, [("expert_choice", False)]),
    (2, "tp2_sp"): (TP2SP, [("expert_choice", True)]),
    (2, "ep2_tp2_sp"): (EP2 | TP2SP, BOTH + MOVIEGEN),
    (2, "ep2_cp2"): (EP2 | CP2, BOTH + MOVIEGEN),
    (4, "ep2_dp4"): (EP2, [("expert_choice", True)]),
    (4, "ep2_tp2_sp"): (EP2 | TP2SP, BOTH),
    (4, "ep4_tp2_sp_ddp"): (EP4 | TP2SP | DDP, [("top_k", True)]),
    (4, "ep2_tp2_sp_cp2"): (EP2 | TP2SP | CP2, [("expert_choice", True)]),
    (4, "ep2_pp2"): (EP2 | PP2, [("top_k", True)]),
}
CASES = [(*key, *batch) for key, (_, batches) in LAYOUTS.items() for batch in batches]
ROW = ("world", "name", "router", "packed")
QUICK_ON_FOUR = {("ep2_dp4", "expert_choice"), ("ep2_tp2_sp", "top_k")}


def case(parallel: dict, router: str, packed: bool, **more) -> dict:
    return {"parallel": parallel, "packed": packed, "model": {"num_layers": 2, **ROUTERS[router]}, **more}


def checkpoint(task: str, parallel: dict, folder) -> dict:
    return case(parallel, "expert_choice", True, task=f"benchmarks.parallel_checkpoints:{task}", folder=str(folder))


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Numbers of each selected case and of one rank; each world size starts once.

    Checkpoints go from four ranks to one, and from one to two.
    """
    folder, wanted = tmp_path_factory.mktemp("worlds"), selected(request, ROW)
    four, one = folder / "from_four", folder / "from_one"
    extra = {
        4: {"saved_on_four": checkpoint("save", EP2 | TP2SP, four)},
        1: {
            **{("one", *batch): case(DDP, *batch) for batch in BATCHES + MOVIEGEN},
            "loaded_on_one": checkpoint("load", DDP, four),
            "saved_on_one": checkpoint("save", DDP, one),
        },
        2: {"loaded_on_two": checkpoint("load", EP2, one), "loaded_on_two_pp": checkpoint("load", PP2, four)},
    }
    found = {}
    for world, cases in extra.items():
        for key, (parallel, batches) in LAYOUTS.items():
            if key[0] == world:
                cases |= {(*key, *batch): case(parallel, *batch) for batch in batches if (*key, *batch) in wanted}
        found |= dict(zip(cases, run_world(world, list(cases.values()), folder / str(world))))
    return found


@pytest.mark.parametrize(
    ROW, rows(CASES, lambda world, name, router, packed: world == 2 or (name, router) in QUICK_ON_FOUR)
)
def test_layout_equals_one_rank(results, world, name, router, packed):
    one, many = results["one", router, packed], results[world, name, router, packed]
    assert_equal_training(one, many)
    assert {f"layers.1.mlp.experts.{i}.linear_fc1.weight" for i in range(4)} <= one["gradients"].keys()
    assert many["expert_load"] == pytest.approx(one["expert_load"], rel=1e-5)
    assert len(one["expert_load"]) == 2 * (4 if router == "top_k" else 3)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("saved_on_four", "loaded_on_one"),
        ("saved_on_one", "loaded_on_two"),
        ("saved_on_four", "loaded_on_two_pp"),
        ("saved_on_four", "saved_on_one"),
    ],
)
def test_checkpoints_move_experts_between_layouts_bitwise_unchanged(results, written, read):
    """Weights, average, Adam's state, fingerprint and the weights in the model are equal."""
    before, after = results[written], results[read]
    for name, value in before.items():
        equal = torch.equal(after[name], value) if isinstance(value, torch.Tensor) else after[name] == value
        assert equal, name
        model = after.get(name.replace("weight.", "model.", 1)) if name.startswith("weight.") else None
        assert model is None or torch.equal(model, value), name
    assert before["step"] == 7
    assert before["drifted"] == []
    assert any("mlp.experts.3." in name for name in before)
