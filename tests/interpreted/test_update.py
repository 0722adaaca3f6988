"""Runs with the fused update have the state of runs with the eager one under all kinds of data parallelism."""

import itertools

import pytest
import torch

from benchmarks.parallel_training import run_world
from dit.backends import process_groups
from tests.interpreted import update_worker
from tests.interpreted.formulas import ULP
from tests.parallel.test_fsdp import assert_close
from tests.parallel.test_optimizer import DDP, DISTRIBUTED, EXPERTS, FSDP, SETTINGS
from tests.support.ranks import rows, selected

RTOL = 1e-5  # of each tensor: float32 roundings of two updates, and their effect on later gradients
EP2 = {**DISTRIBUTED, "expert_model_parallel_size": 2}
OVERLAPPED = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}
ONE = {"ddp1": DDP, "distributed1": DISTRIBUTED}
TWO = {"ddp2": DDP, "distributed2": DISTRIBUTED, "overlapped2": OVERLAPPED, "fsdp2": FSDP}
OFFLOADED = {"training": {**SETTINGS["training"], "ema_offload": True}}
STEPS, SAVED_AT = 2, 1


def case(parallel, precision, kernels, steps=STEPS, settings=SETTINGS, **options):
    fixed = {"task": "tests.interpreted.update_worker:train", "parallel": parallel, "precision": precision}
    return {**fixed, "kernels": kernels, "steps": steps, "run_dir": "none", **settings, **options}


def pairs(name, parallel, **options):
    """Every precision with both updates; one step in bf16, because the interpreter truncates its bf16 copies."""
    return {
        (name, precision, kernels): case(parallel, precision, kernels, steps, **options)
        for precision, steps in (("fp32", STEPS), ("bf16", 1))
        for kernels in ("eager", "triton")
    }


@pytest.fixture(scope="module")
def one_rank(request, one_rank_world, tmp_path_factory):
    """Runs with both updates in this process, and runs that resume with the other update."""
    folder = tmp_path_factory.mktemp("one")
    cases = {key: c for name, parallel in ONE.items() for key, c in pairs(name, parallel).items()}
    cases |= pairs("offloaded", DISTRIBUTED, **OFFLOADED)
    requested = selected(request, ("name", "precision")) | {("distributed1", "fp32")}
    cases = {key: c for key, c in cases.items() if key[:2] in requested}
    resumed = {first for (first,) in selected(request, ("first",))}
    for first, then in (x for x in (("eager", "triton"), ("triton", "eager")) if x[0] in resumed):
        common = {"run_dir": folder / first}
        cases[first, "saved"] = case(DISTRIBUTED, "fp32", first, SAVED_AT, save=True, **common)
        cases[first, "resumed"] = case(DISTRIBUTED, "fp32", then, STEPS - SAVED_AT, **common)
    process_groups.release()  # each run builds its own; this is the last module, so no test uses `one_rank_world` later
    return {key: update_worker.train(case) for key, case in cases.items()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Runs with both updates on two ranks, also with experts, which have a separate optimizer."""
    cases = {key: c for name, parallel in TWO.items() for key, c in pairs(name, parallel).items()}
    cases |= pairs("experts", EP2, settings=EXPERTS)
    return dict(zip(cases, run_world(2, list(cases.values()), tmp_path_factory.mktemp("two"), timeout_s=1800)))


def assert_equal_runs(results, name, precision):
    eager, fused = (results[name, precision, kernels] for kernels in ("eager", "triton"))
    assert fused["grad_norms"] == pytest.approx(eager["grad_norms"], rel=RTOL)
    assert_close(fused["after"], eager["after"], RTOL)
    ulp = ULP[torch.bfloat16] if precision == "bf16" else RTOL
    for weight, expected in eager.get("model", {}).items():
        assert ((fused["model"][weight] - expected).abs() <= ulp * expected.abs().clamp(min=1e-3)).all(), weight


@pytest.mark.parametrize(
    ("name", "precision"),
    rows(itertools.product([*ONE, "offloaded"], ["fp32", "bf16"]), lambda *row: row == ("distributed1", "fp32")),
)
def test_a_run_has_the_eager_state(one_rank, name, precision):
    assert_equal_runs(one_rank, name, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*TWO, "experts"])
def test_runs_of_two_ranks_have_the_eager_state(two_ranks, name, precision):
    assert_equal_runs(two_ranks, name, precision)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["eager", "triton"])
def test_a_run_may_resume_with_the_other_update(one_rank, first):
    """Both updates save and load the same checkpoint: moments, average and Adam's step count."""
    resumed = one_rank[first, "resumed"]
    assert resumed["resumed_at"] == SAVED_AT
    assert_close(resumed["after"], one_rank["distributed1", "fp32", "eager"]["after"], RTOL)
