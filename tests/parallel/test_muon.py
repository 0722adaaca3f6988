"""Muon on every layout trains as on one rank, because it orthogonalises unsharded matrices."""

import pytest
import torch

from benchmarks.parallel_training import run_world
from dit.models.lora_config import LoRAConfig
from dit.parallel.dims import ParallelConfig
from tests.support.ranks import rows, selected

TASK = "tests.parallel.fsdp_worker:train"
SETTINGS = {
    "model": {"qk_layernorm": True, "base_width": 16},
    "optimizer": {"algorithm": "muon", "lr": 2e-3, "weight_decay": 0.5, "clip_grad": 0.5},
}
MODELS = {
    "experts": {"base_width": 16, "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5},
    "deep": {**SETTINGS["model"], "num_layers": 4},
    "lora": {"qk_layernorm": True, "lora": LoRAConfig(rank=3)},
    "lora of a stage": {"qk_layernorm": True, "lora": LoRAConfig(rank=3, targets=["layers.0.*"])},
}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
LAYOUTS = {
    "ddp": {"data_parallel": "ddp"},
    "distributed": {"data_parallel": "distributed_optimizer"},
    "fsdp": {"data_parallel": "fsdp"},
    "fsdp_optim": {"data_parallel": "fsdp", "fsdp_sharding": "optim"},
    "tp": TP,
    "pp": PP,
    "cp": {"context_parallel_size": 2},
}
OF_MODELS = {
    "experts": {"ep": {"expert_model_parallel_size": 2}},
    "deep": {"vpp": {**PP, "virtual_pipeline_model_parallel_size": 2}},
    "lora": {"lora tp": TP, "lora fsdp": LAYOUTS["fsdp"]},
    "lora of a stage": {"lora pp": PP},
}
FOUR = {
    "hybrid": {"data_parallel": "fsdp", "num_distributed_optimizer_instances": 2},
    "tp x distributed": {"data_parallel": "distributed_optimizer", **TP},
}
ALL = {"one": {}, **LAYOUTS, **FOUR}
RESUMED = {"tp": "fsdp_optim", "fsdp": "pp", "distributed": "tp", "one": "hybrid", "hybrid": "distributed"}
"""Layout that resumes a run, by the layout that saved it."""
STEPS, SAVED_AT = 3, 1
ROW, MODEL_ROW, HALF_ROW, RESUMED_ROW = ("layout",), ("model", "layout_of_model"), ("kind", "name"), ("first",)
QUICK, QUICK_MODELS, QUICK_RESUMED = ("tp", "fsdp"), ("lora",), ("tp",)
QUICK_HALF = {("bf16", "fsdp")}
BOUND = 1e-6
"""Newton-Schulz multiplies rounding errors of small singular values by up to 3.4445 ** 5."""
HALF = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "training": {"initial_loss_scale": 2.0, "loss_scale_window": 2}},
    "fp8": {"precision": "bf16", "training": {"fp8": "tensorwise"}},
}
SAME_SUMS, OTHER_SUMS = 2**-14, 2**-3
HALF_RTOL = {
    **{(kind, name): SAME_SUMS for kind in ("bf16", "fp8") for name in ("ddp", "distributed", "fsdp")},
    **{(kind, name): OTHER_SUMS for kind in ("bf16", "fp8") for name in ("tp", "pp")},
    ("bf16", "cp"): OTHER_SUMS,
    **{("fp16", name): OTHER_SUMS for name in ("distributed", "fsdp")},
}
"""`SAME_SUMS`: layouts with the micro-batches of one rank and fp32 sums of gradients. Others round partial sums in
bf16, or gradients with another loss scale: momenta differ by 4e-3, and Newton-Schulz multiplies that by up to 20."""


def case(parallel, model="plain", **options):
    ParallelConfig(**parallel).validate()
    settings = {**SETTINGS, "model": MODELS[model]} if model in MODELS else SETTINGS
    return {"task": TASK, "parallel": parallel, "run_dir": "none", "steps": STEPS, **settings, **options}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    plain, models, halves, resumed = (selected(request, row) for row in (ROW, MODEL_ROW, HALF_ROW, RESUMED_ROW))
    start = {"checkpoint": {"interval": 0, "start_from": str(folder / "one")}}
    on_base = {"lora": start, "lora of a stage": start}
    offloaded = {
        "optimizer": {**SETTINGS["optimizer"], "offload": True},
        "training": {"global_batch_size": 4, "ema_decay": 0.5, "ema_offload": True},
    }
    worlds = {1: {"one": case({})}}
    for size, layouts in ((4, FOUR), (2, LAYOUTS)):
        worlds[size] = {name: case(parallel) for name, parallel in layouts.items() if (name,) in plain}
    if ("offload",) in plain:
        worlds[2]["offload"] = case(LAYOUTS["distributed"], **offloaded)
    for kind, name in sorted(halves):
        worlds[1]["one", kind] = case({}, **HALF[kind])
        worlds[2][name, kind] = case(LAYOUTS[name], **HALF[kind])
    sizes = {name: size for size, layouts in ((1, ["one"]), (2, LAYOUTS), (4, FOUR)) for name in layouts}
    for first, then in RESUMED.items():
        shared = {"run_dir": folder / first}
        if (first,) in resumed or first == "one":  # the adapters start from it
            worlds[sizes[first]][first, "saved"] = case(ALL[first], steps=SAVED_AT, save=True, **shared)
        if (first,) in resumed:
            worlds[sizes[then]][first, "resumed"] = case(ALL[then], steps=STEPS - SAVED_AT, **shared)
    for model, name in sorted(models):
        options = on_base.get(model, {})
        worlds[1]["one", model] = case({}, model, **options)
        worlds[2][name] = case(OF_MODELS[model][name], model, **options)
    found = {}
    for size, named in ((size, named) for size, named in worlds.items() if named):
        found |= dict(zip(named, run_world(size, list(named.values()), folder / f"world{size}")))
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
    linears = ("attention.linear_qkv", "attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert names - by_adamw == {f"layers.{i}.{linear}.weight" for i in range(2) for linear in linears}


@pytest.mark.parametrize(ROW, rows([(name,) for name in (*LAYOUTS, *FOUR, "offload")], lambda name: name in QUICK))
def test_training_under_a_layout_equals_one_rank(results, layout):
    assert_equal(results[layout], results["one"])


@pytest.mark.parametrize(
    MODEL_ROW,
    rows([(model, n) for model, names in OF_MODELS.items() for n in names], lambda model, n: model in QUICK_MODELS),
)
def test_training_of_other_models_equals_one_rank(results, model, layout_of_model):
    assert_equal(results[layout_of_model], results["one", model])


@pytest.mark.parametrize(HALF_ROW, rows(HALF_RTOL, lambda *case: case in QUICK_HALF))
def test_half_precision_training_equals_one_rank(results, kind, name):
    """Errors are relative to the change of each weight over the run."""
    run, one = results[name, kind]["after"], results["one", kind]
    changes = {key: one["after"][key] - one["before"][key] for key in run if key.startswith("weight.")}
    errors = {key: (run[key] - one["after"][key]).norm() / change.norm() for key, change in changes.items()}
    assert {key: error for key, error in errors.items() if error > HALF_RTOL[kind, name]} == {}


@pytest.mark.parametrize(RESUMED_ROW, rows([(name,) for name in RESUMED], lambda name: name in QUICK_RESUMED))
def test_a_run_resumes_on_another_layout(results, first):
    run = results[first, "resumed"]
    assert run["resumed_at"] == SAVED_AT
    saved = results[first, "saved"]["after"]
    assert all(torch.equal(run["before"][name], tensor) for name, tensor in saved.items())
    assert_equal(run, results["one"])
