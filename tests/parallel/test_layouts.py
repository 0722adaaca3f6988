"""Every layout computes the losses, gradients, gradient norms and weights of one rank."""

import pytest
import torch

from dit.verify.compare import SUM_RTOL, relative_errors
from dit.verify.ranks import run_world
from tests.parallel.layout_rows import FAULTS, HALF_QUICK, HALF_SLOW, LONG, QUICK, SLOW, case_of, in_fp32, of_one_rank
from tests.support.ranks import others_selected, rows, selected
from tests.support.reference import assert_equal_training
from tests.support.symmetric_memory import OPERATIONS

pytestmark = pytest.mark.timeout(2700)

ROW, HALF_ROW = ("model", "ranks", "layout"), ("half_model", "half_ranks", "half_layout")
BF16_TP_RTOL = 3e-2  # of one gradient; four units of bf16, 2^-7 each; measured 1.7e-2
BF16_TP_LOSS_RTOL = 2e-3  # of means over tokens; a quarter unit; measured 2e-4 for losses, 1.1e-3 for norms
BF16_TP_FURTHER = 1.25  # ratio of errors against fp32 gradients, layout to one rank; measured 0.92 to 1.10
EXPERTS = [f"layers.1.mlp.experts.{i}.linear_fc1.weight" for i in range(4)]
INTERVALS = ["conditioner.interval.linear_1.weight", "conditioner.interval.linear_2.weight"]
BLOCKS = [
    f"layers.{i}.{linear}.lora_{part}.weight"
    for i in range(2)
    for linear in ("attention.linear_qkv", "attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    for part in "AB"
]
TRAINED = {
    "expert choice": EXPERTS,
    "top k": EXPERTS,
    "uncertainty": ["uncertainty.weight"],
    "mean flow": INTERVALS,
    "plain mean flow": INTERVALS,
    "adapted blocks": BLOCKS,
}
"""Parameters with a gradient by model."""
LINEARS = {"dit": 4, "cross": 6}
"""Linears of a layer that gather or scatter tokens under sequence parallelism."""


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Numbers of each selected row and of its row of one rank; each world size starts once.

    If other tests than rows are selected, also those of all faults and of `TRAINED`.
    """
    folder, results = tmp_path_factory.mktemp("layouts"), {}
    chosen, faults = selected(request, ROW) | selected(request, HALF_ROW), {}
    if others_selected(request, ROW, HALF_ROW):
        faults = FAULTS
        chosen |= {of_one_rank(row) for row, _ in FAULTS.values()}
        chosen |= {(model, 1, "ddp") for model in (*TRAINED, "dit", "contrastive", "cosine")}
    chosen |= {of_one_rank(row) for row in (*chosen, *map(in_fp32, chosen))}
    cases = {row: case_of(row) for row in sorted(chosen)}
    cases |= {(*row, name): {**case_of(row), "break": fault} for name, (row, fault) in faults.items()}
    for world in sorted({ranks for _, ranks, *_ in cases}):
        keys = sorted((key for key in cases if key[1] == world), key=lambda key: holds_groups(cases[key]))
        results |= zip(keys, run_world(world, [cases[key] for key in keys], folder / str(world), timeout_s=2400))
    return results


def holds_groups(case):
    """Return whether process groups stay after a case, because Megatron-Core keeps those of FSDP and of experts.

    Threads of these groups slow the next cases down, so such cases run last.
    """
    return case["parallel"].get("data_parallel") == "fsdp" or "num_experts" in case["model"]


@pytest.mark.parametrize(ROW, rows([*QUICK, *SLOW, *LONG], lambda *row: row in QUICK, lambda *row: row in LONG))
def test_layout_equals_one_rank(results, model, ranks, layout):
    row = model, ranks, layout
    one, many = results[of_one_rank(row)], results[row]
    assert_equal_training(one, many)
    assert many["expert_load"] == pytest.approx(one["expert_load"], rel=1e-5)
    if "adapted" in model:
        assert all("lora_" in name for name in many["gradients"])
    if layout == "tp2 sp overlapped" and model in LINEARS:
        # A linear calls one operation forward and the other one backward; 4 micro-batches, 2 layers.
        assert many["overlapped"] == dict.fromkeys(OPERATIONS, len(many["losses"]) * 4 * 2 * LINEARS[model])
    else:
        assert bool(many["overlapped"]) == ("overlapped" in layout)


@pytest.mark.parametrize("model", TRAINED)
def test_one_rank_trains_the_parameters_of_a_row(results, model):
    one = results[model, 1, "ddp"]
    assert set(TRAINED[model]) <= one["gradients"].keys()
    assert len(one["expert_load"]) == {"expert choice": 2 * 3, "top k": 2 * 4}.get(model, 0)
    if model == "adapted blocks":
        assert set(TRAINED[model]) == one["gradients"].keys()


def test_objectives_of_rows_have_their_own_losses(results):
    contrastive, cosine, plain = (results[model, 1, "ddp"]["losses"] for model in ("contrastive", "cosine", "dit"))
    assert plain not in (contrastive, cosine)


@pytest.mark.parametrize(HALF_ROW, rows([*HALF_QUICK, *HALF_SLOW], lambda *row: row in HALF_QUICK))
def test_adapters_in_half_precision_equal_those_of_one_rank(results, half_model, half_ranks, half_layout):
    """Within fp32 summation error for data parallelism and FSDP; with TP + SP, as close to fp32 as one rank."""
    row = half_model, half_ranks, half_layout
    exact, one, many = results[of_one_rank(in_fp32(row))], results[of_one_rank(row)], results[row]
    assert many["drifted"] == []
    assert many["gradients"].keys() == one["gradients"].keys() == exact["gradients"].keys()
    split = "tp2" in half_layout
    for kind in ("losses", "grad_norms"):
        assert many[kind] == pytest.approx(one[kind], rel=BF16_TP_LOSS_RTOL if split else SUM_RTOL), kind
    errors = relative_errors(one["gradients"], many["gradients"])
    bound = BF16_TP_RTOL if split else SUM_RTOL
    assert {name: error for name, error in errors.items() if not error <= bound} == {}
    of_many, of_one = (
        torch.stack([(side["gradients"][name] - g).norm() for name, g in exact["gradients"].items()]).norm()
        for side in (many, one)
    )
    assert of_one > 0
    assert of_many <= (BF16_TP_FURTHER if split else 1 + SUM_RTOL) * of_one


@pytest.mark.parametrize("world", [2, 4])
def test_layouts_release_their_process_groups(results, world):
    """Process groups are released before the next layout, so that connections and threads do not add up."""
    keys = [key for key in results if key[1] == world and not holds_groups(case_of(key[:3]))]
    counts = [results[key]["connections"] for key in keys]
    assert max(counts) <= min(counts) + 16, dict(zip(keys, counts))  # layouts have 47 to 62 on four ranks


def wrong_by(results, fault, factor):
    """Return the parameters whose gradients a fault changes by more than a factor."""
    row, _ = FAULTS[fault]
    errors = relative_errors(results[of_one_rank(row)]["gradients"], results[*row, fault]["gradients"])
    return {name for name, error in errors.items() if not error <= factor}


def test_gradients_are_wrong_without_the_sequence_parallel_marks(results):
    wrong = wrong_by(results, "sequence parallel", 0.1)
    names = results["dit", 1, "ddp"]["gradients"].keys()
    assert {name for name in names if name.startswith(("embed.", "head.", "conditioner."))} <= wrong
    split = ("linear_qkv.weight", "modulation.linear.weight")  # sharded, so the rank has the complete gradient
    assert not any(name.endswith(split) for name in wrong)


def test_a_missing_sum_over_tensor_parallel_ranks_is_detected(results):
    assert wrong_by(results, "text tokens", 100 * SUM_RTOL) == {"embed_text.bias"}
    assert "layers.1.attention.q_layernorm.weight" in wrong_by(results, "local heads", 100 * SUM_RTOL)


@pytest.mark.parametrize("fault", ["sum over stages", "buckets"])
def test_embedders_differ_unless_the_same_elements_are_summed(results, fault):
    row, _ = FAULTS[fault]
    assert any(name.startswith("conditioner") for name in wrong_by(results, fault, 1000 * SUM_RTOL))
    assert any(name.startswith("conditioner") for name in results[*row, fault]["drifted"])


def test_marked_replicas_count_once_in_the_norm(results):
    row, _ = FAULTS["norm of copies"]
    one, broken = results[of_one_rank(row)], results[*row, "norm of copies"]
    assert broken["grad_norms"][0] > one["grad_norms"][0] * (1 + 100 * SUM_RTOL)
    parts = [(2 if n.startswith("conditioner") else 1) * g.square().sum() for n, g in one["gradients"].items()]
    assert broken["grad_norms"][0] == pytest.approx(float(sum(parts)) ** 0.5, rel=1e-5)
