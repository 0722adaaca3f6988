"""Every data-parallel kind and precision trains as `optimizer_worker.formulas`."""

import pytest

from benchmarks.parallel_training import run_world
from dit.optimizer.schedules import TorchOneCycle
from tests.parallel.test_fsdp import assert_close
from tests.support.ranks import others_selected, rows, selected

DDP, DISTRIBUTED, FSDP = ({"data_parallel": kind} for kind in ("ddp", "distributed_optimizer", "fsdp"))
KINDS = {
    1: {"ddp1": DDP, "distributed1": DISTRIBUTED, "fsdp1": FSDP},
    2: {
        "ddp2": DDP,
        "distributed2": DISTRIBUTED,
        "fsdp2": FSDP,
        "fsdp2_optim_grads": {**FSDP, "fsdp_sharding": "optim_grads"},
        "fsdp2_optim": {**FSDP, "fsdp_sharding": "optim"},
    },
}
EP2 = {"ep2_ddp": {**DDP, "expert_model_parallel_size": 2}, "ep2_dist": {"expert_model_parallel_size": 2}}
PRECISIONS = ("fp32", "bf16", "fp16")
CASES = [(name, precision) for named in KINDS.values() for name in named for precision in PRECISIONS]
ROW = ("name", "precision")
OFFLOAD_ROW = ("offloaded",)
HALF_QUICK = {"bf16": ("distributed2",), "fp16": ("fsdp2_optim",)}
OFFLOAD_QUICK = ("distributed1",)
RESUMED = ("distributed2", "fsdp2")
NUM_STEPS, SAVED_AT = 5, 3


class ShortCycle(TorchOneCycle):
    """The first learning rate is a third of the peak."""

    pct_start, div_factor, final_div_factor = 0.5, 3.0, 4.0


SETTINGS = {
    # Norms of queries and keys start as ones, so decaying them would show; eps is as large as the gradients.
    "model": {"qk_layernorm": True, "num_layers": 1},
    "optimizer": {"lr": 2e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.5, "clip_grad": 0.6},
    # Learning rate and beta1 rise and fall.
    "schedule": ShortCycle(),
    "training": {"num_steps": NUM_STEPS, "global_batch_size": 4, "ema_decay": 0.7, "ema_start_step": 2},
}
SETTINGS["training"]["ema_sigma_rel"] = [0.1, 0.25]
OFFLOADED = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "offload": True}}
MIXTURE = {"num_layers": 1, "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5}
EXPERTS = {**SETTINGS, "model": MIXTURE}
# Sums over ranks have another order, which changes the rounding of one bf16 weight in ten thousand.
RTOL = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Results of the formulas and of each selected case; each world size starts once."""
    folder = tmp_path_factory.mktemp("optimizer")
    wanted, offloaded = selected(request, ROW), {name for (name,) in selected(request, OFFLOAD_ROW)}

    def case(task, parallel, precision, settings=SETTINGS, **options):
        run_dir = folder / options.pop("run_dir", "none")
        if precision != "fp16":  # with lower rates, its gradients would be below the range of fp16
            settings = {**settings, "model": {**settings["model"], "base_width": 16}}
        if precision == "fp16":  # a power of two, within the range of the gradients
            settings = {**settings, "training": {**settings.get("training", {}), "initial_loss_scale": 64.0}}
        return {"task": task, "parallel": parallel, "precision": precision, "run_dir": run_dir, **settings, **options}

    def run(*args, steps=NUM_STEPS, **options):
        return case("tests.parallel.fsdp_worker:train", *args, steps=steps, **options)

    def formulas(*args):
        return case("tests.parallel.optimizer_worker:formulas", DDP, *args)

    worlds = {
        world: {
            (name, p): run(parallel, p) for name, parallel in named.items() for p in PRECISIONS if (name, p) in wanted
        }
        for world, named in KINDS.items()
    }
    for world, named in KINDS.items():
        moved = {name: parallel for name, parallel in named.items() if name in offloaded}
        worlds[world] |= {(name, "offload"): run(parallel, "bf16", OFFLOADED) for name, parallel in moved.items()}
    worlds[1] |= {("formulas", p): formulas(p) for p in PRECISIONS}
    if others_selected(request, ROW, OFFLOAD_ROW):
        worlds[1]["expert formulas"] = formulas("fp32", EXPERTS)
        worlds[2] |= {name: run(parallel, "fp32", EXPERTS) for name, parallel in EP2.items()}
        resumed = [(name, KINDS[2][name], SETTINGS, SETTINGS) for name in RESUMED]
        resumed += [("offload", DISTRIBUTED, OFFLOADED, SETTINGS), ("onload", DISTRIBUTED, SETTINGS, OFFLOADED)]
        for name, parallel, first, then in resumed:
            world = worlds[2 if name in RESUMED else 1]
            world[name, "saved"] = run(parallel, "bf16", first, run_dir=name, steps=SAVED_AT, save=True)
            world[name, "resumed"] = run(parallel, "bf16", then, run_dir=name, steps=NUM_STEPS - SAVED_AT)
    found = {}
    for world, named in worlds.items():
        found |= dict(zip(named, run_world(world, list(named.values()), folder / f"world{world}")))
    return found


def assert_trained(run, formulas, rtol, done=0):
    """Compare gradient norms, weights, average, both moments and Adam's step count."""
    assert run["resumed_at"] == done
    assert run["grad_norms"] == pytest.approx(formulas["grad_norms"][done:], rel=rtol)
    assert_close(run["after"], formulas["after"], rtol)


def test_some_steps_are_clipped_and_no_state_is_zero(results):
    """Some steps are clipped and some are not; no tensor of the state is zero."""
    norms = results["formulas", "fp32"]["grad_norms"]
    assert min(norms) < SETTINGS["optimizer"]["clip_grad"] < max(norms)
    assert all(tensor.any() for tensor in results["formulas", "fp32"]["after"].values())


@pytest.mark.parametrize(ROW, rows(CASES, lambda name, p: p == "fp32" or name in HALF_QUICK[p]))
def test_a_run_trains_by_the_formulas(results, name, precision):
    assert_trained(results[name, precision], results["formulas", precision], RTOL[precision])


@pytest.mark.parametrize("name", EP2)
def test_experts_train_by_the_formulas(results, name):
    """Megatron-Core chains a separate optimizer for experts."""
    assert_trained(results[name], results["expert formulas"], RTOL["fp32"])


@pytest.mark.parametrize(
    OFFLOAD_ROW, rows([(name,) for named in KINDS.values() for name in named], lambda name: name in OFFLOAD_QUICK)
)
def test_moments_in_host_memory_equal_the_formulas(results, offloaded):
    assert_trained(results[offloaded, "offload"], results["formulas", "bf16"], RTOL["bf16"])


@pytest.mark.parametrize("name", [*RESUMED, "offload", "onload"])
def test_a_resumed_run_trains_by_the_formulas(results, name):
    """Loading a checkpoint changes no setting of the optimizer."""
    assert_trained(results[name, "resumed"], results["formulas", "bf16"], RTOL["bf16"], SAVED_AT)
