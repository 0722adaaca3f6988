"""`launch.verify` with the settings of a run: moments in host memory, half precision, loss scale."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parallel_training import trial_of
from dit.kernels.adamw import AdamW, Elements, Rates
from dit.optimizer import update
from dit.optimizer.ema import EMA
from dit.optimizer.master_weights import MasterShard
from dit.optimizer.update import Update
from dit.parallel.dims import ParallelConfig
from dit.parallel.loss_scale import LossScale
from dit.verify.ranks import run_world
from dit.verify.trial import EMA_DECAY, HALF_OPTIMIZER, train
from launch.config_file import built
from launch.train import call_recipe
from launch.verify import Pair, compare, in_half, not_verified, tiny_pair

RUN = "dit.verify.trial:run_case"
TOO_LARGE = 2.0**22
"""First loss scale of fp16; the command starts with a larger one, with which more attempts overflow."""


def forgetful_offload(case: dict) -> dict:
    """Train without copying the updated moments to the host."""
    original = update.with_moments_on_the_host

    def forgetful(adamw: AdamW) -> AdamW:
        on_the_host = original(adamw)

        def update_copies(parameters: Sequence[Elements], rates: Rates) -> None:
            copies = [replace(p, exp_avg=p.exp_avg.clone(), exp_avg_sq=p.exp_avg_sq.clone()) for p in parameters]
            on_the_host(copies, rates)

        return update_copies

    with mock.patch.object(update, "with_moments_on_the_host", forgetful):
        return train(case["trial"])


def other_loss_scale(case: dict) -> dict:
    """Train in fp16 with twice the divisor of the loss scale on rank 1."""
    start = LossScale.start

    def doubled(self: LossScale, tokens: int) -> None:
        start(self, tokens)
        self.tokens *= 1 + (dist.get_rank() == 1)

    with mock.patch.object(LossScale, "start", doubled):
        return train(case["trial"])


def unchanged_model(case: dict) -> dict:
    """Train without copying the master weights to the half-precision weights of the model."""
    part_of = Update._copy_of

    def elsewhere(self: Update, shard: MasterShard) -> Optional[Tensor]:
        part = part_of(self, shard)
        return None if part is None else part.clone()

    with mock.patch.object(Update, "_copy_of", elsewhere):
        return train(case["trial"])


def one_unit_off(case: dict) -> dict:
    """Train with model weights that differ from the rounded master weights by one unit in the last place."""
    gather = Update._gather

    def inexact(self: Update) -> None:
        for shard in self.shards:
            if (part := self._copy_of(shard)) is not None:
                part.view(torch.int16).add_(1)
        gather(self)

    with mock.patch.object(Update, "_gather", inexact):
        return train(case["trial"])


def other_decay(case: dict) -> dict:
    """Train with a slightly wrong decay of the average, equal on all ranks."""
    with mock.patch.object(EMA, "weight", return_value=1.01 - EMA_DECAY):
        return train(case["trial"])


def nan_weight(case: dict) -> dict:
    """Train with a NaN weight."""

    def alter(chunks: list) -> None:
        next(chunks[0].parameters()).data.view(-1)[0] = torch.nan

    return train(replace(case["trial"], alter=alter))


def overflowing_experts(case: dict) -> list[dict]:
    """Train experts in fp16 with a loss scale whose first attempts overflow, then with the first one that fits."""
    experts = {"num_layers": 2, "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5}
    small = {"parallel": {"data_parallel": "ddp"}, "packed": True, "model": experts, "precision": "fp16"}
    trial, found, scale = replace(trial_of(small), optimizer=HALF_OPTIMIZER), [], TOO_LARGE
    for _ in range(2):
        found.append(train(replace(trial, training=replace(trial.training, initial_loss_scale=scale))))
        scale = found[0]["loss_scales"][0]
    return found


SETTINGS: dict[str, tuple[str, Optional[str], str]] = {
    "offload": ("fp32", "offload", RUN),
    "offload, moments forgotten": ("fp32", "offload", "tests.parallel.test_verify_settings:forgetful_offload"),
    "muon": ("fp32", "muon", RUN),
    "bf16": ("bf16", None, RUN),
    "bf16, no copy": ("bf16", None, "tests.parallel.test_verify_settings:unchanged_model"),
    "bf16, one unit": ("bf16", None, "tests.parallel.test_verify_settings:one_unit_off"),
    "bf16, other decay": ("bf16", None, "tests.parallel.test_verify_settings:other_decay"),
    "fp16": ("fp16", None, RUN),
    "fp16, NaN": ("fp16", None, "tests.parallel.test_verify_settings:nan_weight"),
    "fp16, other scale": ("fp16", None, "tests.parallel.test_verify_settings:other_loss_scale"),
}
"""For each name: precision, other settings, and the task, which may have a fault."""


def pair_with(precision: str, other: Optional[str]) -> Pair:
    """Return the pair of `tiny_dit` with this precision, and with offloads or Muon, averages and recompute."""
    layout = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    config = replace(built(call_recipe("tiny_dit")), parallel=layout)
    training = replace(config.training, precision=precision, ema_offload=other == "offload")
    optimizer = replace(config.optimizer, offload=other == "offload")
    if other == "muon":
        training = replace(training, ema_sigma_rel=[0.1], recompute="full", recompute_layers=1)
        optimizer = replace(optimizer, algorithm="muon", muon_momentum=0.5)
    pair = tiny_pair(replace(config, training=training, optimizer=optimizer), 2)
    if precision == "fp32":
        return pair
    with mock.patch("dit.verify.trial.LARGE_LOSS_SCALE", TOO_LARGE):
        return in_half(pair, training)


@pytest.fixture(scope="module")
def with_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Verdict of each of `SETTINGS` and the result of its layout; results of `overflowing_experts`."""
    folder = tmp_path_factory.mktemp("settings")
    pairs = {name: pair_with(precision, other) for name, (precision, other, _) in SETTINGS.items()}
    ones = {repr(pair.one): pair.one for pair in pairs.values()}
    experts = {"task": f"{__name__}:overflowing_experts"}
    cases = [{"task": RUN, "trial": trial} for trial in ones.values()]
    *references, overflows = run_world(1, [*cases, experts], folder / "1")
    reports = dict(zip(ones, references, strict=True))
    cases = [{"task": SETTINGS[name][2], "trial": pair.many} for name, pair in pairs.items()]
    results = zip(pairs.items(), run_world(2, cases, folder / "2"), strict=True)
    verdicts = {name: (compare(pair, reports[repr(pair.one)], many), many) for (name, pair), many in results}
    return {**verdicts, "experts": overflows}


@pytest.mark.parametrize("name", [name for name in SETTINGS if "," not in name])
def test_the_settings_of_a_recipe_equal_one_rank(with_settings: dict[str, Any], name: str) -> None:
    """Offloaded moments and average, and half precision, against one rank in fp32 without offload."""
    verdict, _ = with_settings[name]
    assert verdict.is_equal, verdict.text()
    assert set(verdict.comparison.errors) == {"losses", "grad_norms", "gradients", "parameters", "averages"}


def test_the_optimizer_averages_and_recompute_of_a_recipe_are_compared(with_settings: dict[str, Any]) -> None:
    pair, (verdict, _) = pair_with("fp32", "muon"), with_settings["muon"]
    for trial in (pair.one, pair.many):
        assert (trial.optimizer.algorithm, trial.optimizer.muon_momentum) == ("muon", 0.5)
        assert (trial.training.recompute, trial.training.recompute_layers) == ("full", 1)
    errors = verdict.comparison.errors
    powers = {name for name in errors["averages"] if name.endswith(" (power 1)")}
    assert {f"{name} (power 1)" for name in errors["parameters"]} == powers
    assert in_half(pair, replace(pair.one.training, precision="bf16")).many.optimizer.algorithm == "muon"


@pytest.mark.parametrize(("pack", "kinds"), [(None, {"ragged": 3, "dense": 1}), (256, {"ragged": 4})])
@pytest.mark.parametrize("replicas", [1, 2])
def test_dense_micro_batches_are_compared_if_the_recipe_has_them(
    pack: Optional[int], kinds: dict[str, int], replicas: int
) -> None:
    """One of four, the same under every layout; packs have samples of several lengths."""
    config = built(call_recipe("tiny_dit"))
    pair = tiny_pair(replace(config, data=replace(config.data, max_tokens_per_pack=pack)), 2)
    streams = [pair.many.stream(rank, replicas, 1) for rank in range(replicas)]
    step = [next(stream) for _ in range(4 // replicas) for stream in streams]
    assert Counter(batch.layout.kind for batch in step) == kinds
    one = pair.one.stream(0, 1, 1)
    assert [batch.keys for batch in step] == [next(one).keys for _ in step]


def test_settings_that_are_not_verified_are_named() -> None:
    config = built(call_recipe("tiny_dit"))
    assert not_verified(config) == ""
    training = replace(config.training, kernels="triton", cuda_graph=True)
    assert not_verified(replace(config, training=training)) == (
        "settings of the recipe that are not verified: training.kernels=triton, training.cuda_graph=True"
    )


def test_offload_that_loses_the_moments_is_detected(with_settings: dict[str, Any]) -> None:
    """The first update has no earlier moments, so only the second update is wrong."""
    verdict, _ = with_settings["offload, moments forgotten"]
    assert verdict.wrong == ()
    assert verdict.comparison.wrong("parameters")
    assert verdict.comparison.wrong("averages")


def test_bf16_weights_that_miss_an_update_are_detected(with_settings: dict[str, Any]) -> None:
    verdict, _ = with_settings["bf16, no copy"]
    assert verdict.wrong == ()
    assert verdict.comparison.wrong("losses").keys() == {"step 1"}
    assert verdict.comparison.wrong("parameters")


@pytest.mark.parametrize(("name", "kind"), [("one unit", "weight"), ("other decay", "average")])
def test_an_inexact_copy_within_half_precision_bounds_is_detected(
    with_settings: dict[str, Any], name: str, kind: str
) -> None:
    sound, (verdict, many) = with_settings["bf16"][1], with_settings[f"bf16, {name}"]
    assert sound["inexact"] == []
    assert not any(verdict.comparison.wrong(quantity) for quantity in verdict.comparison.errors)
    assert len(many["inexact"]) > 10
    assert all(f": the {kind} " in line for line in many["inexact"])
    assert not verdict.is_equal
    assert f"after the updates: {many['inexact'][0]}" in verdict.text()


def test_a_loss_that_is_not_finite_is_not_an_overflow(with_settings: dict[str, Any]) -> None:
    """No loss scale can fix it, so it is reported as in other precisions."""
    verdict, many = with_settings["fp16, NaN"]
    assert not any(map(math.isfinite, many["losses"]))
    assert verdict.comparison.wrong("losses").keys() == {"step 0", "step 1"}


def test_attempts_that_overflow_do_not_count_in_the_load_of_experts(with_settings: dict[str, Any]) -> None:
    overflows, fits = with_settings["experts"]
    assert overflows["loss_scales"][0] < TOO_LARGE
    assert fits["losses"] == overflows["losses"]
    assert fits["expert_load"] == overflows["expert_load"]


def test_an_overflow_lowers_the_loss_scale_until_the_step_fits(with_settings: dict[str, Any]) -> None:
    _, many = with_settings["fp16"]
    assert len(many["losses"]) == 2
    assert all(1.0 < scale < TOO_LARGE for scale in many["loss_scales"])


def test_a_loss_scale_that_differs_between_ranks_is_detected(with_settings: dict[str, Any]) -> None:
    verdict, _ = with_settings["fp16, other scale"]
    assert verdict.wrong
    assert verdict.comparison.wrong("losses").keys() <= {"step 1"}
