"""Muon trains on every layout as on one rank: whole matrices are orthogonalised, not shards."""

import pytest
import torch

from benchmarks.parallel_world import run_world
from dit.parallel.dims import ParallelConfig

TASK = "tests.parallel.fsdp_worker:train"
SETTINGS = {
    "model": {"qk_layernorm": True},
    "optimizer": {"algorithm": "muon", "lr": 2e-3, "weight_decay": 0.5, "clip_grad": 0.5},
}
EXPERTS = {**SETTINGS, "model": {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5}}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "ddp": {"data_parallel": "ddp"},
    "distributed": {"data_parallel": "distributed_optimizer"},
    "fsdp": {"data_parallel": "fsdp"},
    "fsdp_optim": {"data_parallel": "fsdp", "fsdp_sharding": "optim"},
    "tp": TP,
    "pp": {"pipeline_model_parallel_size": 2},
}
RESUMED = {"tp": "fsdp", "fsdp": "pp", "distributed": "tp"}
"""Layout of the second part of a run, by that of the first one."""
STEPS, SAVED_AT = 4, 2
BOUND = 1e-6
"""Newton-Schulz multiplies the rounding of small singular values by up to 3.4445 ** 5."""
BF16_RTOL = 2**-7


def case(parallel, settings=SETTINGS, **options):
    ParallelConfig(**parallel).validate()
    return {"task": TASK, "parallel": parallel, "run_dir": "none", "steps": STEPS, **settings, **options}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    offloaded = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "offload": True}}
    one = {"one": case({}), "one bf16": case({}, precision="bf16"), "one experts": case({}, EXPERTS)}
    two = {name: case(parallel) for name, parallel in LAYOUTS.items()}
    two["offload"] = case(LAYOUTS["distributed"], offloaded)
    two |= {f"{name} bf16": case(LAYOUTS[name], precision="bf16") for name in ("ddp", "distributed", "fsdp")}
    two["ep"] = case({"expert_model_parallel_size": 2}, EXPERTS)
    for first, then in RESUMED.items():
        two[first, "saved"] = case(LAYOUTS[first], run_dir=folder / first, steps=SAVED_AT, save=True)
        two[first, "resumed"] = case(LAYOUTS[then], run_dir=folder / first, steps=STEPS - SAVED_AT)
    found = {}
    for world, named in ((1, one), (2, two)):
        found |= dict(zip(named, run_world(world, list(named.values()), folder / f"world{world}")))
    return found


def assert_equal(run, one, bound=BOUND):
    assert run["after"].keys() == one["after"].keys()
    for name, expected in one["after"].items():
        torch.testing.assert_close(
            run["after"][name], expected, rtol=0.0, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_only_weights_of_blocks_have_no_second_moment(results):
    names = {name.partition(".")[2] for name in results["one"]["after"] if name.startswith("weight.")}
    by_adamw = {name.partition(".")[2] for name in results["one"]["after"] if name.startswith("exp_avg_sq.")}
    linears = ("modulation.linear", "attention.linear_qkv", "attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert names - by_adamw == {f"layers.{i}.{linear}.weight" for i in range(2) for linear in linears}


@pytest.mark.parametrize("name", [*LAYOUTS, "offload"])
def test_a_layout_trains_as_one_rank(results, name):
    assert_equal(results[name], results["one"])


def test_experts_train_as_on_one_rank(results):
    assert_equal(results["ep"], results["one experts"])


@pytest.mark.parametrize("name", ["ddp", "distributed", "fsdp"])
def test_master_weights_of_bf16_train_as_on_one_rank(results, name):
    run, one = results[f"{name} bf16"]["after"], results["one bf16"]["after"]
    for key, expected in one.items():
        if key.startswith("weight."):
            assert (run[key] - expected).norm() <= BF16_RTOL * expected.norm() + 1e-6, key


@pytest.mark.parametrize("first", RESUMED)
def test_a_run_resumes_on_another_layout(results, first):
    run = results[first, "resumed"]
    assert run["resumed_at"] == SAVED_AT
    saved = results[first, "saved"]["after"]
    assert all(torch.equal(run["before"][name], tensor) for name, tensor in saved.items())
    assert_equal(run, results["one"])
