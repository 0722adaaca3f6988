"""Pipelines: sends, samples, held-out losses and resumed runs; `test_layouts.py` compares gradients."""

import pytest

from benchmarks.parallel_training import run_world, tiny_model
from dit.models.lora_config import LoRAConfig
from dit.objectives.edm import EDM
from dit.objectives.losses import UncertaintyWeighting
from energon_data.mock import MockData

PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ONE = {"data_parallel": "ddp"}
PREDICTING = {
    2: {"pp2": {**PP2, "data_parallel": "ddp"}, "pp2_vpp2": VPP2},
    4: {"pp2_tp2_sp": {**PP2, **TP2SP}, "pp2_distributed_optimizer2": PP2},
}
LEGS = {1: [(ONE, 4)], 2: [(PP2, 2), ({**VPP2, "pipeline_layers": [1, 1, 1, 1]}, 3), (TP2SP, 4)]}
PARTS = {
    "model": tiny_model(),
    "data": MockData(
        shapes=["1x8x8", "1x4x8"], text_tokens=5, max_tokens_per_pack=40, pack_multiple_of=8, num_streams=1
    ),
    "objective": EDM(weighting=UncertaintyWeighting()),
}
# Only the order of sums differs, and the solver steps amplify the error little.
PREDICTION_RTOL = 1e-5


def task(name: str, **case) -> dict:
    return {"task": f"tests.parallel.pipeline_cases:{name}", **case}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Result of each case; each world size starts once."""
    folder = tmp_path_factory.mktemp("worlds")
    cases: dict = {4: {}, 1: {}, 2: {}}
    cases[2]["sends"] = task("watch_sends", parallel=VPP2, packed=True)
    cases[1]["one", "predict"] = task("predict", parallel=ONE)
    for world, layouts in PREDICTING.items():
        cases[world] |= {(name, "predict"): task("predict", parallel=p) for name, p in layouts.items()}
    for world, legs in LEGS.items():
        cases[world]["legs", world] = task("run_legs", legs=legs, folder=folder / f"run{world}", parts=PARTS)
    for name, layer in {"save_adapters": 3, "refuse": 7}.items():
        model = {"lora": LoRAConfig(targets=[f"layers.{layer}.*"])}
        averaging = {"packed": True, "recompute": {"ema_decay": 0.5}}
        cases[2][name] = task(name, parallel=PP2, model=model, folder=str(folder / name), **averaging)
    found: dict = {}
    for world, named in cases.items():
        found |= zip(named, run_world(world, list(named.values()), folder / str(world), timeout_s=600.0))
    return found


def test_sent_tensors_do_not_change_until_they_have_arrived(results):
    assert {"send_next", "send_prev"} <= set(results["sends"]["sent"])
    assert results["sends"]["touched"] == []


@pytest.mark.parametrize("name", [name for names in PREDICTING.values() for name in names])
def test_samples_and_held_out_losses_equal_one_rank(results, name):
    """Samples of flow matching, and of EDM with churn noise and rescaled guidance."""
    one, many = results["one", "predict"], results[name, "predict"]
    assert many["differ_between_stages"] == []
    assert many["weights_back"]
    assert many["losses"] == pytest.approx(one["losses"], rel=PREDICTION_RTOL)
    for drawn in ("samples", "churned"):
        assert (many[drawn] - one[drawn]).norm() / one[drawn].norm() <= PREDICTION_RTOL


def test_a_first_stage_without_adapters_counts_the_updates_of_the_others(results):
    assert results["save_adapters"]["adam_step"] == 2


def test_adapters_that_no_stage_has_are_refused_on_all_ranks_by_one_message(results):
    message, *others = results["refuse"]
    assert others == [message]
    assert "['layers.7.*'] matches no linear layer of DiT, so" in message
    assert "layers.3.mlp.linear_fc2" in message


def test_a_run_continues_on_other_layouts_with_the_same_numbers(results):
    one, many = ([line for line in results["legs", world] if line["kind"] == "scalars"] for world in (1, 2))
    losses = ("loss", "loss_raw", "loss_uncertainty", "held_out/loss", "held_out/loss_uncertainty")
    for name in ("step", "consumed_samples", "grad_norm", *losses):
        mine, theirs = ([line[name] for line in lines if name in line] for lines in (many, one))
        assert len(theirs) > 1, f"too few lines have {name}"
        assert mine == pytest.approx(theirs, rel=1e-4)
