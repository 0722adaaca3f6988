"""Every pipeline computes the numbers of one rank: gradients, updates, samples, held-out losses and checkpoints."""

import pytest
import torch

from benchmarks.parallel_world import run_world
from dit.verify.compare import SUM_RTOL, largest_error, relative_errors
from tests.parallel import pipeline_cases
from tests.parallel.test_layouts import TP2SP
from tests.support.reference import assert_equal_training

PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    2: {
        "pp2": {**PP2, "data_parallel": "ddp"},
        "pp2_uneven": {**PP2, "pipeline_layers": [1, 3]},
        "pp2_vpp2": VPP2,
    },
    4: {
        "pp4": {"pipeline_model_parallel_size": 4},
        "pp2_tp2_sp": {**PP2, **TP2SP},
        "pp2_distributed_optimizer2": PP2,
        "pp2_vpp2_distributed_optimizer2_overlap": {**VPP2, **OVERLAP},
    },
}
CASES = [(world, name, True) for world, named in LAYOUTS.items() for name in named] + [(2, "pp2_vpp2", False)]
ONE = {"data_parallel": "ddp"}
PREDICTING = {2: ("pp2", "pp2_vpp2"), 4: ("pp2_tp2_sp", "pp2_distributed_optimizer2")}
# Embedders as large as the layers of a stage, so that the border between two data-parallel shards is inside them.
LARGE_EMBEDDERS = {
    "parallel": {**PP2, "pipeline_layers": [1, 3]},
    "model": {"num_classes": 500},
    "packed": True,
}
LEGS = {1: [(ONE, 4)], 2: [(PP2, 2), ({**VPP2, "pipeline_layers": [1, 1, 1, 1]}, 3), (TP2SP, 4)]}
# Only the order of sums differs, and the solver steps amplify the error little.
PREDICTION_RTOL = 1e-5


def task(name: str, **case) -> dict:
    return {"task": f"tests.parallel.pipeline_cases:{name}", **case}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Result of each case; each world size starts once. The checkpoint moves from 4 ranks to 1 and then to 2."""
    folder = tmp_path_factory.mktemp("worlds")
    saved, moved = str(folder / "saved"), str(folder / "moved")
    cases: dict = {4: {}, 1: {}, 2: {}}
    for packed in (False, True):
        cases[1]["one", packed] = {"parallel": ONE, "packed": packed}
    for world, name, packed in CASES:
        cases[world][name, packed] = {"parallel": LAYOUTS[world][name], "packed": packed}
    pp2 = {"parallel": LAYOUTS[2]["pp2"], "packed": True}
    cases[2]["broken", "sum"] = {**pp2, "break": pipeline_cases.forget_conditioners}
    cases[2]["broken", "norm"] = {**pp2, "break": pipeline_cases.count_copies}
    cases[2]["sends"] = task("watch_sends", parallel=VPP2, packed=True)
    cases[1]["one", "large embedders"] = {**LARGE_EMBEDDERS, "parallel": ONE}
    cases[4]["pp2", "large embedders"] = LARGE_EMBEDDERS
    cases[4]["broken", "buckets"] = {**LARGE_EMBEDDERS, "break": pipeline_cases.share_buckets}
    cases[1]["one", "predict"] = task("predict", parallel=ONE)
    for world, names in PREDICTING.items():
        for name in names:
            cases[world][name, "predict"] = task("predict", parallel=LAYOUTS[world][name])
    cases[4]["saved"] = task("save", parallel={**PP2, **TP2SP}, packed=True, folder=saved)
    cases[4]["loaded", 4] = task("load", parallel={**VPP2, **OVERLAP}, folder=saved)
    cases[1]["loaded", 1] = task("load", parallel=ONE, folder=saved, save_to=moved)
    cases[2]["loaded", 2] = task("load", parallel=LAYOUTS[2]["pp2_uneven"], folder=moved)
    for world, legs in LEGS.items():
        cases[world]["legs", world] = task("run_legs", legs=legs, folder=str(folder / f"run{world}"))
    found: dict = {}
    for world, named in cases.items():
        found |= zip(named, run_world(world, list(named.values()), folder / str(world), timeout_s=600.0))
    return found


@pytest.mark.parametrize(("world", "name", "packed"), CASES)
def test_pipeline_equals_one_rank(results, world, name, packed):
    assert_equal_training(results["one", packed], results[name, packed])


def test_sent_tensors_do_not_change_until_they_have_arrived(results):
    assert {"send_next", "send_prev"} <= set(results["sends"]["sent"])
    assert results["sends"]["touched"] == []


def test_embedders_may_be_as_large_as_a_stage(results):
    assert_equal_training(results["one", "large embedders"], results["pp2", "large embedders"])


@pytest.mark.parametrize(("reference", "what"), [(True, "sum"), ("large embedders", "buckets")])
def test_embedders_differ_unless_the_same_elements_are_summed(results, reference, what):
    one, broken = results["one", reference], results["broken", what]
    wrong = relative_errors(one["gradients"], broken["gradients"])
    assert largest_error(error for name, error in wrong.items() if name.startswith("conditioner")) > 1000 * SUM_RTOL
    assert any(name.startswith("conditioner") for name in broken["drifted"])


def test_marked_replicas_count_once_in_the_norm(results):
    one, broken = results["one", True], results["broken", "norm"]
    assert broken["grad_norms"][0] > one["grad_norms"][0] * (1 + 100 * SUM_RTOL)
    parts = [(2 if n.startswith("conditioner") else 1) * g.square().sum() for n, g in one["gradients"].items()]
    assert broken["grad_norms"][0] == pytest.approx(float(sum(parts)) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("name", [name for names in PREDICTING.values() for name in names])
def test_samples_and_held_out_losses_equal_one_rank(results, name):
    """Samples of flow matching, and of EDM with churn noise and rescaled guidance."""
    one, many = results["one", "predict"], results[name, "predict"]
    assert many["differ_between_stages"] == []
    assert many["weights_back"]
    assert many["losses"] == pytest.approx(one["losses"], rel=PREDICTION_RTOL)
    for drawn in ("samples", "churned"):
        assert (many[drawn] - one[drawn]).norm() / one[drawn].norm() <= PREDICTION_RTOL


@pytest.mark.parametrize("world", [4, 1, 2])
def test_checkpoints_move_between_layouts_bitwise_unchanged(results, world):
    saved, loaded = results["saved"], results["loaded", world]
    assert saved["drifted"] == loaded["drifted"] == []
    assert loaded["shapes"] == saved["shapes"]
    assert loaded["step"] == saved["step"] == 2
    assert loaded["tensors"].keys() == saved["tensors"].keys()
    different = [name for name, tensor in saved["tensors"].items() if not torch.equal(tensor, loaded["tensors"][name])]
    assert different == []
    for name, weight in loaded["ema_weights"].items():
        assert torch.equal(weight, saved["tensors"][f"ema.{name}"])


def test_a_run_continues_on_other_layouts_with_the_same_numbers(results):
    one, many = ([line for line in results["legs", world]["metrics"] if line["kind"] == "scalars"] for world in (1, 2))
    losses = ("loss", "loss_raw", "loss_uncertainty", "held_out/loss", "held_out/loss_uncertainty")
    for name in ("step", "consumed_samples", "grad_norm", *losses):
        mine, theirs = ([line[name] for line in lines if name in line] for lines in (many, one))
        assert len(theirs) > 1, f"too few lines have {name}"
        assert mine == pytest.approx(theirs, rel=1e-4)
