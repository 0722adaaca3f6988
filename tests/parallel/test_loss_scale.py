"""fp16 training: an overflow on one rank skips the step on all; the scale halves, grows, and resumes to the bit."""

import math

import pytest
import torch

from benchmarks.parallel_training import run_world
from dit.settings import TrainingConfig
from tests.support.ranks import others_selected, rows, selected

DDP, DISTRIBUTED, FSDP = ({"data_parallel": kind} for kind in ("ddp", "distributed_optimizer", "fsdp"))
KINDS = {
    **{"ddp": DDP, "distributed": DISTRIBUTED, "fsdp": FSDP},
    "pp2": {**DDP, "pipeline_model_parallel_size": 2},
    "tp2_sp": {**DISTRIBUTED, "tensor_model_parallel_size": 2, "sequence_parallel": True},
}
QUICK = ("fsdp", "pp2")
HYBRID = {**FSDP, "num_distributed_optimizer_instances": 2}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5}
INITIAL, WINDOW = 4.0, 2
TRAINING = {**{"global_batch_size": 4, "ema_decay": 0.5, "initial_loss_scale": INITIAL, "loss_scale_window": WINDOW}}
SUBNORMAL = 2.0**-24
FIRST = 2
SETTINGS = ("initial_loss_scale", "loss_scale_window")
LARGE = {
    "data": {"shapes": ["1x32x64", "1x32x32"], "max_tokens_per_pack": 1280},
    "training": {name: getattr(TrainingConfig, name) for name in SETTINGS},
}
BAD_STEP, STEPS, SAVED_AT = 2, 6, 3
ON_RANK_1 = {"steps": [BAD_STEP], "rank": 1}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder, kinds = tmp_path_factory.mktemp("loss_scale"), {kind for (kind,) in selected(request, ("kind",))}

    def case(parallel, steps=STEPS, run_dir="none", **options):
        changes = options.pop("training", {})
        dynamic = () if "loss_scale" not in changes else SETTINGS  # a constant scale has no such settings
        training = {name: value for name, value in {**TRAINING, **changes}.items() if name not in dynamic}
        task = f"tests.parallel.loss_scale_worker:{options.pop('task', 'train')}"
        shared = {"task": task, "parallel": parallel, "precision": "fp16", "run_dir": folder / run_dir}
        model = {"num_layers": parallel.get("pipeline_model_parallel_size", 1), **options.pop("model", {})}
        return {**shared, "model": model, "training": training, "steps": steps, **options}

    worlds = {1: {}}
    for size, layouts in {2: KINDS, 4: {"hybrid": HYBRID}}.items():
        chosen = {name: parallel for name, parallel in layouts.items() if name in kinds}
        worlds[size] = {(name, "good"): case(parallel, BAD_STEP - 1) for name, parallel in chosen.items()}
        worlds[size] |= {(name, "bad"): case(parallel, BAD_STEP, fault=ON_RANK_1) for name, parallel in chosen.items()}
    if others_selected(request, ("kind",)):
        worlds[1] = {
            # Powers of two, so that fp16 rounds the same digits.
            **{scale: case(DDP, 1, training={"loss_scale": scale}) for scale in (1.0, 4.0, 64.0)},
            ("one rank", "large"): case(DDP, FIRST, **LARGE),
            "huge": case(DDP, STEPS, training={"initial_loss_scale": 2.0**32}),
        }
        worlds[2] |= {
            ("tp2_sp", "large"): case(KINDS["tp2_sp"], FIRST, **LARGE),
            "experts": case({**DISTRIBUTED, "expert_model_parallel_size": 2}, STEPS, model=EXPERTS, fault=ON_RANK_1),
            "one optimizer": case(DISTRIBUTED, task="overflow_on_rank_1"),
            "long": case(DISTRIBUTED, fault=ON_RANK_1),
            "saved": case(DISTRIBUTED, SAVED_AT, run_dir="stopped", fault=ON_RANK_1, save=True),
            "resumed": case(DISTRIBUTED, STEPS - SAVED_AT, run_dir="stopped"),
            "always": case(DISTRIBUTED, fault={"steps": list(range(1, STEPS + 1)), "rank": 1}),
            "loss": case(DISTRIBUTED, fault={**ON_RANK_1, "forward": True, "factor": math.nan}),
            "constant": case(DISTRIBUTED, fault=ON_RANK_1, training={"loss_scale": 32.0}),
        }
    found = {}
    for world, named in worlds.items():
        found |= zip(named, run_world(world, list(named.values()), folder / f"world{world}") if named else [])
    return found


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_all_ranks_follow_an_overflow_that_only_one_of_them_recorded(results):
    assert results["one optimizer"] == {"overflowed": True, "is_good": False, "ratio": 0.5}


@pytest.mark.parametrize("layout", ["one rank", "tp2_sp"])
def test_packs_of_a_thousand_tokens_lose_at_most_one_of_the_first_updates(results, layout):
    """The default scale fits the mean loss, not a sum over tokens, and is the same on every layout."""
    run, one = results[layout, "large"], results["one rank", "large"]
    assert run["skips"][-1] <= 1
    assert run["scales"] == one["scales"]
    assert run["norms"] == pytest.approx(one["norms"], rel=1e-2)


@pytest.mark.parametrize("kind", rows([(kind,) for kind in (*KINDS, "hybrid")], lambda kind: kind in QUICK))
def test_an_overflow_on_one_rank_skips_the_step_on_all(results, kind):
    """Weights, average, moments and Adam's step count do not change; the scale halves.

    Hybrid sharding: also on the other instance, whose gradients are finite.
    """
    good, bad = results[kind, "good"], results[kind, "bad"]
    assert bad["norms"] == [*good["norms"], math.inf]
    assert bad["skips"] == [0, 1]
    assert bad["scales"] == [INITIAL, INITIAL]
    assert bad["last_scale"] == INITIAL / 2
    assert bad["step"] == BAD_STEP  # the batch is not repeated
    assert_same_state(bad["after"], good["after"])
    assert int(bad["after"]["step"]) == BAD_STEP - 1


def test_the_scale_doubles_after_the_window(results):
    """Two good steps double the scale; an overflow halves it and restarts the count."""
    run = results["long"]
    assert run["scales"] == [INITIAL * factor for factor in (1, 1, 1 / 2, 1 / 2, 1, 1)]
    assert run["last_scale"] == 2 * INITIAL
    assert run["skips"] == [0, 1, 1, 1, 1, 1]


def test_experts_and_dense_layers_share_one_scale(results):
    """Megatron-Core has one optimizer for each, which would have separate scales."""
    assert results["experts"]["scales"] == results["long"]["scales"]
    assert results["experts"]["skips"] == results["long"]["skips"]


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(results):
    """Also the count of good steps, which is one of two when the run is saved."""
    saved, resumed, full = results["saved"], results["resumed"], results["long"]
    assert resumed["resumed_at"] == SAVED_AT
    for name in ("scales", "skips", "norms"):
        assert saved[name] + resumed[name] == full[name]
    assert resumed["last_scale"] == full["last_scale"]
    assert_same_state(resumed["after"], full["after"])


def test_an_overflow_with_the_smallest_scale_stops_the_run(results):
    run = results["always"]
    assert run["scales"] == [4.0, 2.0, 1.0]
    assert run["last_scale"] == 1.0
    assert run["step"] == 2
    assert "Each rank's own loss is finite" in run["error"]
    assert "loss scale of 1," in run["error"]
    assert "precision=bf16" in run["error"]
    assert_same_state(run["after"], run["before"])


def test_an_overflow_with_a_constant_scale_stops_the_run(results):
    run = results["constant"]
    assert run["scales"] == [32.0, 32.0]
    assert "loss scale of 32" in run["error"]
    assert run["step"] == 1


def test_a_loss_that_is_not_finite_stops_the_run(results):
    """No scale can help, because the loss is scaled after it is computed."""
    run = results["loss"]
    assert run["step"] == BAD_STEP - 1
    assert "The loss of rank 1 is not finite" in run["error"]
    assert "smallest possible" not in run["error"]
    assert run["last_scale"] == INITIAL, "its gradients say nothing of the scale"


def test_gradients_do_not_depend_on_the_scale(results):
    """The first moment is a tenth of the gradient; its tolerance is 2^-24, the smallest fp16 number."""
    reference = results[64.0]
    for scale in (1.0, 4.0):
        assert results[scale]["norms"] == pytest.approx(reference["norms"], rel=1e-5)
        for name, tensor in reference["after"].items():
            if name.startswith("exp_avg."):
                torch.testing.assert_close(results[scale]["after"][name], tensor, rtol=1e-3, atol=SUBNORMAL, msg=name)


def test_a_loss_scale_that_is_too_large_falls_until_steps_fit(results):
    """From 2^32 every step halves it; the weights do not change."""
    run = results["huge"]
    assert run["scales"] == [2.0 ** (32 - i) for i in range(STEPS)]
    assert run["skips"] == list(range(1, STEPS + 1))
    assert_same_state(run["after"], run["before"])
