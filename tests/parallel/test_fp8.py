"""Quantised products under every layout: operands are slices of the unsharded ones, and training equals one rank."""

from dataclasses import replace

import pytest
import torch

from benchmarks.parallel_training import run_world
from dit.kernels.fp8 import BLOCKS
from dit.parallel.dims import ParallelConfig
from dit.verify.compare import FLOOR, FP8_BOUNDS, FP32_FLOOR, HALF_BOUNDS, compare_training, relative_errors
from launch.config_file import built
from launch.train import call_recipe
from launch.verify import Pair, compare, pairs_of
from tests.parallel.fp8_worker import forget_other_ranks
from tests.support.ranks import one_step, others_selected, rows, selected

WORKER = "tests.parallel.fp8_worker"
TP2, CP2 = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}
TP2SP = {**TP2, "sequence_parallel": True}
LAYOUTS = {
    2: {
        **{"tp2": TP2, "tp2_sp": TP2SP, "cp2": CP2, "pp2": {"pipeline_model_parallel_size": 2}},
        **{"dp2": {"data_parallel": "ddp"}, "distributed_optimizer2": {}, "fsdp2": {"data_parallel": "fsdp"}},
        "cp2_load_balanced": {**CP2, "context_split": "load_balanced"},
    },
    4: {"tp2_sp_cp2": {**TP2SP, **CP2}},
}
CROSS = {"backbone": "dit_cross"}
FLUX = {
    **{"backbone": "flux", "num_joint_layers": 2, "num_single_layers": 2, "ffn_hidden_size": 128, "pooled_size": 6},
    **{"rope_axes": [4, 8, 4], "guidance": 3.5},
}
CASES = [(world, name, kind) for world, named in LAYOUTS.items() for name in named for kind in BLOCKS]
CASES.remove((2, "cp2_load_balanced", "blockwise"))
ROW = ("world", "name", "kind")
QUICK = {(2, "tp2_sp", "tensorwise"), (2, "cp2", "mxfp8")}
OTHERS = {
    # The products for keys and values of a text are not quantised.
    "text, cp2": {"parallel": CP2, "kind": "mxfp8", "model": CROSS},
    "text and image streams, tp2": {"parallel": TP2, "kind": "tensorwise", "model": FLUX},
    "recomputed, tp2_sp": {"parallel": TP2SP, "kind": "tensorwise", "recompute": "full"},
    "recomputed in part, fsdp2": {"parallel": {"data_parallel": "fsdp"}, "kind": "mxfp8", "recompute": "selective"},
}
OTHER_ROW, QUICK_OTHERS = ("other",), ("text, cp2", "recomputed, tp2_sp")
BROKEN = ("tp2", "cp2")
ONE = {"data_parallel": "ddp"}
STEPS = 2
VERIFIED: list = [("tiny_dit_cross", CP2), ("tiny_flux", TP2)]
RESUMED: dict = {"tensorwise": TP2, "mxfp8": {}}
SHARDS = [
    {"parallel": {**CP2, **parallel}, "fp8": kind, "apart": apart}
    for kind in BLOCKS
    for parallel in (TP2, TP2SP)
    for apart in ((False, True) if kind in ("tensorwise", "nvfp4") else (False,))
]


def verified(recipe: str, parallel: dict) -> Pair:
    """Return the pair that `launch.verify` compares for a recipe with quantised products."""
    config = built(call_recipe(recipe))
    config = replace(config, parallel=ParallelConfig(**parallel), training=replace(config.training, fp8="tensorwise"))
    return one_step(config, 2, config.training.fp8)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Numbers of each selected case and of one rank; each world size starts once.

    If other tests than rows are selected: for each of `SHARDS` and each rank, the operands that differ from slices of
    the unsharded ones; for each of `VERIFIED`, one rank, the layout, and the layout with a scale per rank; for each of
    `RESUMED`, in bf16, a complete run, a run that saves one step earlier, and one resumed from there.
    """
    folder, wanted = tmp_path_factory.mktemp("fp8"), selected(request, ROW)
    others = {name: OTHERS[name] for (name,) in selected(request, OTHER_ROW)}

    def verify(trial):
        return {"task": "dit.verify.trial:run_case", "trial": trial}

    def run(kind, steps, run_dir, **options):
        training = {"global_batch_size": 4, "ema_decay": 0.5, "fp8": kind}
        case = {"precision": "bf16", "training": training, "steps": steps, "run_dir": folder / kind / run_dir}
        return {"task": "tests.parallel.fsdp_worker:train", "parallel": RESUMED[kind], **case, **options}

    def train(parallel, kind, **case):
        return {"task": f"{WORKER}:train", "parallel": parallel, "fp8": kind, **case}

    worlds = {
        1: {("one", kind): train(ONE, kind) for kind in BLOCKS}
        | {("one", name): train(**{**case, "parallel": ONE}) for name, case in others.items()}
        | {("plain", kind): train(ONE, kind, quantised=False) for kind in BLOCKS},
        2: {(name, kind): train(LAYOUTS[2][name], kind) for world, name, kind in sorted(wanted) if world == 2}
        | {("broken", name): train(LAYOUTS[2][name], "tensorwise", **{"break": forget_other_ranks}) for name in BROKEN}
        | {("many", name): train(**case) for name, case in others.items()},
        4: {(name, kind): train(LAYOUTS[4][name], kind) for world, name, kind in sorted(wanted) if world == 4},
    }
    if others_selected(request, ROW, OTHER_ROW):
        worlds[4] |= {("shards", i): {"task": f"{WORKER}:shards", **case} for i, case in enumerate(SHARDS)}
        for i, pair in enumerate(verified(*case) for case in VERIFIED):
            worlds[1]["verified", i] = verify(pair.one)
            worlds[2]["verified many", i] = verify(pair.many)
            worlds[2]["verified broken", i] = verify(replace(pair.many, alter=forget_other_ranks))
        for kind in RESUMED:
            worlds[2]["full run", kind] = run(kind, STEPS, "full")
            worlds[2]["saved run", kind] = run(kind, STEPS - 1, "stopped", save=True)
            worlds[2]["resumed run", kind] = run(kind, 1, "stopped")
    return {
        name: result
        for world, cases in worlds.items()
        if cases
        for name, result in zip(cases, run_world(world, list(cases.values()), folder / str(world)))
    }


def assert_equal(one, many):
    assert compare_training(one, many, FP8_BOUNDS).differences == ()


@pytest.mark.parametrize("case", range(len(SHARDS)))
def test_quantised_shards_are_bitwise_equal_to_slices_of_one_rank(results, case):
    """x, weight and gradient, quantised along each dimension, on TP 2 x CP 2, for column and row linears."""
    wrong = results["shards", case]
    assert len(wrong) == 4
    if SHARDS[case]["apart"]:  # each rank scales by its own largest magnitude
        assert all(wrong)
    else:
        assert wrong == [[]] * 4


@pytest.mark.parametrize(ROW, rows(CASES, lambda *case: case in QUICK))
def test_layout_equals_one_rank(results, world, name, kind):
    assert_equal(results["one", kind], results[name, kind])


@pytest.mark.parametrize(OTHER_ROW, rows([(name,) for name in OTHERS], lambda name: name in QUICK_OTHERS))
def test_other_models_and_recompute_equal_one_rank(results, other):
    """A stream of few text tokens has wider bounds, because one rounding is a larger share of a gradient."""
    bounds = HALF_BOUNDS["bf16"] if OTHERS[other].get("model") == FLUX else FP8_BOUNDS
    assert compare_training(results["one", other], results["many", other], bounds).differences == ()


def test_recompute_changes_no_number(results):
    recomputed, saved = results["one", "recomputed, tp2_sp"], results["one", "tensorwise"]
    assert max(relative_errors(saved["gradients"], recomputed["gradients"]).values()) == 0


@pytest.mark.parametrize("name", BROKEN)
def test_scales_of_single_ranks_are_far_outside_the_bounds(results, name):
    """Without the maximum over ranks, gradients differ by more than five times their bound."""
    broken = compare_training(results["one", "tensorwise"], results["broken", name], FP8_BOUNDS)
    assert broken.largest("gradients") > 5 * FP8_BOUNDS["gradients"]


@pytest.mark.parametrize("kind", BLOCKS)
def test_all_linears_of_the_blocks_are_quantised_and_no_others(results, kind):
    """Quantisation changes gradients by more than ten times the bound of layouts, and by less than 15 % (30 %)."""
    errors = relative_errors(results["plain", kind]["gradients"], results["one", kind]["gradients"])
    assert 10 * FP8_BOUNDS["gradients"] < max(errors.values()) < (0.3 if kind == "nvfp4" else 0.15)
    plain, quantised = (results[name, kind]["losses"][0] for name in ("plain", "one"))
    assert 0 < abs(quantised / plain - 1) < 0.01


@pytest.mark.parametrize("case", range(len(VERIFIED)))
def test_the_command_verifies_quantised_products(results, case):
    """A layout with a scale per rank exceeds the bounds; without `training.fp8` there is nothing to verify."""
    pair = verified(*VERIFIED[case])
    one, many, broken = (results[name, case] for name in ("verified", "verified many", "verified broken"))
    assert (pair.precision, pair.bounds) == ("fp8 tensorwise", FP8_BOUNDS)
    assert compare(pair, one, many).is_equal
    assert not compare(pair, one, broken).is_equal
    assert [pair.precision for pair in pairs_of(built(call_recipe("tiny_dit_cross")), 2)] == ["fp32"]


@pytest.mark.parametrize(
    ("parallel", "bounds", "floor"),
    [(TP2, FP8_BOUNDS, FP32_FLOOR), (TP2SP, HALF_BOUNDS["bf16"], FLOOR)],
    ids=["tp2", "tp2_sp"],
)
def test_only_sequence_parallelism_pads_a_text_stream(parallel, bounds, floor):
    """Scales then differ from one rank, so the command uses the bounds of bf16."""
    pair = verified("tiny_flux", parallel)
    assert (pair.bounds, pair.floor) == (bounds, floor)


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(results, kind):
    assert results["resumed run", kind]["resumed_at"] == STEPS - 1
    resumed, full = (results[f"{run} run", kind]["after"] for run in ("resumed", "full"))
    assert resumed.keys() == full.keys()
    assert [name for name, tensor in full.items() if not torch.equal(resumed[name], tensor)] == []
