"""Bad numbers on one of two ranks: all ranks decide alike, the policy recovers the run, and the source is named.

The result of a policy must equal that of a run in which the same was done by hand.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults import injections
from tests.integration import actions
from tests.integration.runs import assert_same_bits, checkpoint, incidents, outcome, overrides, read_tensors, scalars
from tests.support.faults import together
from tests.support.ranks import Job, rows, run_jobs, selected

STEPS, SAVED, BAD = 12, 4, 7
EXPERTS = {"model__num_experts": 4, "model__moe_ffn_hidden_size": 32}
LATE: dict[str, dict[str, Any]] = {
    "dp2": {},
    "pp2": {"parallel__pipeline_model_parallel_size": 2},
    "experts": {**EXPERTS, "model__moe_router": "top_k"},
    "fsdp": {"parallel__data_parallel": "fsdp"},
}
"""Layouts in which a step's loss and norm are read one step later."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"parallel__expert_model_parallel_size": 2, **EXPERTS},
    # One log line covers several steps, one of which is bad.
    "experts": {**EXPERTS, "model__moe_router": "top_k", "training__log_interval": 5},
    "dp2": {},
    **{f"{layout} late": {**settings, "training__log_interval": 100} for layout, settings in LATE.items()},
    "tp2": {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": False},
    "dist_opt": {"parallel__data_parallel": "distributed_optimizer"},
    "fsdp": {"parallel__data_parallel": "fsdp"},
    "fsdp_grads": {"parallel__data_parallel": "fsdp", "parallel__fsdp_sharding": "optim_grads"},
    "overlap": {"parallel__overlap_grad_reduce": True},
    "compiled": {"training__kernels": "compile"},
    "pp2": {"parallel__pipeline_model_parallel_size": 2},
}
FAULTS: dict[str, dict[str, Any]] = {
    "data": {"place": "data"},
    "forward": {"place": "forward", "layer": "layers.1.mlp"},
    "backward": {"place": "backward", "layer": "layers.1.mlp"},
    "spike": {"place": "data", "factor": 1e4},
    "first stage": {"place": "backward", "layer": "layers.0.mlp", "rank": 0},
    "weight": {"place": "weight", "layer": "layers.1.mlp.linear_fc1"},
}
NAMED = {
    "data": "in the data (latents)",
    "forward": "in the output of layers.1.mlp",
    "backward": "in the backward pass of ",
    "first stage": "in the backward pass of ",
    "weight": "in the gradient of the weight layers.1.mlp.linear_fc1.weight on rank 1",
}
ANYWHERE = ("data", "forward", "backward", "spike")
CASES = [
    *(("dp2", fault, "skip") for fault in ANYWHERE),
    *(("dp2", fault, "rewind") for fault in ANYWHERE),
    *((layout, fault, policy) for layout in ("tp2", "pp2") for fault in ANYWHERE for policy in ("skip", "rewind")),
    *((layout, "data", policy) for layout in ("dist_opt", "fsdp") for policy in ("skip", "rewind")),
    *(("experts", "data", policy) for policy in ("skip", "rewind")),
    *((f"{layout} late", "data", "skip") for layout in LATE),
    # With pipeline parallelism, a micro-batch's backward pass comes after the next one's forward pass.
    ("pp2", "first stage", "skip"),
    # Gradients are reduced while the backward pass runs.
    *((layout, "weight", "skip") for layout in ("overlap", "fsdp", "fsdp_grads")),
    ("compiled", "data", "skip"),
]


def arguments(run_dir: Path, layout: str, **settings: Any) -> list[str]:
    """Return the arguments of a run with small packs and two micro-batches per replica and step."""
    own = {
        "logging__tensorboard": False,
        "model__num_layers": 2,
        "schedule__warmup_steps": 2,
        "training__num_steps": STEPS,
        "training__global_batch_size": 4,
        "training__log_interval": 1,
        "training__precision": "fp32",
        "training__ema_decay": 0.9,
        "training__validation_interval": 0,
        "training__sample_interval": 0,
        "checkpoint__interval": SAVED,
        "checkpoint__keep_last": 9,
        **LAYOUTS[layout],
        **settings,
    }
    return ["--yes", "--factory", "tiny_dit_pack", *overrides(run_dir, **own)]


SPIKES = {"training__spike_threshold": 30}


def micro_batches(layout: str) -> int:
    """Return the number of micro-batches of each replica in a step."""
    return 4 if layout.startswith(("tp2", "pp2")) else 2


def bad_step(layout: str, fault: str) -> int:
    """Return the step with the fault. Losses are read late only after the first 20 updates."""
    return SPIKE_AT if fault == "spike" or layout.endswith("late") else BAD


def is_quick(layout: str, fault: str, policy: str) -> bool:
    return (layout, fault, policy) == ("dp2", "forward", "skip")


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """Run the selected cases, and runs in which the same was done by hand."""
    jobs: dict[str, Job] = {}

    def add(name: str, layout: str, fault: Any = None, at: str = "", **settings: Any) -> None:
        words = arguments(folder / (at or name), layout, **settings)
        jobs.setdefault(name, Job(actions.train, {"arguments": words, "fault": fault}, ranks=2))

    wanted = selected(request, ("layout", "fault", "policy"))
    for layout, fault, policy in sorted(wanted):
        bad = bad_step(layout, fault)
        fault_settings = {"step": bad, "rank": 1, **FAULTS[fault]}
        more = {**(SPIKES if fault == "spike" else {}), "training__on_bad_numbers": policy}
        length = {"training__num_steps": bad + 5}
        name = f"{layout} {fault} {policy}"
        add(name, layout, partial(injections.injected, fault_settings), **more, **length)
        oracle = f"{layout} {bad} {policy} by hand"
        if policy == "skip":
            add(oracle, layout, partial(injections.left_out, bad), **length)
        else:
            saved = (bad - 1) // SAVED * SAVED
            add(f"{oracle} before", layout, at=oracle, training__stop_at_step=saved, **length)
            passed = (bad - saved) * micro_batches(layout)
            add(oracle, layout, partial(injections.data_passed_over, passed), **length)
    return run_jobs(folder / "world", jobs)


SPIKE_AT = 23  # after the history of 16 steps that a spike needs


@pytest.mark.parametrize(("layout", "fault", "policy"), rows(CASES, is_quick))
def test_recovery_from_a_bad_step_equals_manual_recovery(
    ended: dict[str, Any], folder: Path, layout: str, fault: str, policy: str
) -> None:
    """Weights, average and Adam's state equal those of a run that omitted the update (skip) or the data (rewind)."""
    name, bad = f"{layout} {fault} {policy}", bad_step(layout, fault)
    assert [run.code for run in ended[name]] == [0, 0], ended[name][0].err
    by_hand = folder / f"{layout} {bad} {policy} by hand"
    assert_same_bits(read_tensors(checkpoint(folder / name, bad + 5)), read_tensors(checkpoint(by_hand, bad + 5)))
    if policy == "skip":
        lost, expected = scalars(folder / name, "loss"), scalars(by_hand, "loss")
        assert lost == {step: loss for step, loss in expected.items() if step != bad}
        assert max(scalars(folder / name, "skipped_updates").values()) == 1
        assert scalars(folder / name, "consumed_samples") == scalars(by_hand, "consumed_samples")
    if layout.startswith("experts"):
        for load in ("max_load", "aux_loss", "per_token"):
            found, expected = (scalars(run, f"experts/layer_1/{load}") for run in (folder / name, by_hand))
            assert found
            assert found == pytest.approx(expected, nan_ok=False), load


@pytest.mark.parametrize(("layout", "fault", "policy"), rows(CASES, is_quick))
def test_the_bad_layer_rank_and_sample_are_named(
    ended: dict[str, Any], folder: Path, layout: str, fault: str, policy: str
) -> None:
    """One incident for the step, with its ranks and samples, and the first bad layer, rank and sample."""
    name, bad = f"{layout} {fault} {policy}", bad_step(layout, fault)
    assert ended[name]
    found = [record for record in incidents(folder / name) if record["incident"] != "rewind"]
    assert [(r["incident"], r["step"]) for r in found] == [("spike" if fault == "spike" else "not_finite", bad)]
    details = found[0]["details"]
    report = json.loads((folder / name / "bad_steps" / f"step_{bad:07d}.json").read_text())
    assert details["action"] == policy
    assert report["repeats"] is (None if layout == "compiled" else True)
    assert "forward layers.1.mlp" in report["layers"] or layout == "pp2"
    if fault == "spike":
        assert "the largest loss is" in details["began"]
        return
    assert NAMED[fault] in details["began"], details["began"]
    first = report["first"]
    assert first["rank"] == FAULTS[fault].get("rank", 1)
    if fault == "weight":  # the gradient is a sum over all samples of a micro-batch
        return
    samples = details["samples"].get(str(first["rank"])) or details["samples"]["0"]
    assert first["samples"] == [samples[1]], "it is the second sample of the step"


WEIGHT = {"place": "weight", "layer": "layers.1.mlp.linear_fc1", "times": 1}


@pytest.fixture(scope="module")
def endings(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """Run on two replicas: runs that stop, are killed, or have a fault that does not repeat."""
    jobs: dict[str, Job] = {}

    def add(name: str, *faults: Any, at: str = "", **settings: Any) -> None:
        words = arguments(folder / (at or name), "dp2", **settings)
        jobs[name] = Job(actions.train, {"arguments": words, "fault": partial(together, *faults)}, ranks=2)

    def bad(*steps: int, place: str = "data", **more: Any) -> Any:
        return partial(injections.injected, *({"step": step, "rank": 1, "place": place, **more} for step in steps))

    skip, rewind = {"training__on_bad_numbers": "skip"}, {"training__on_bad_numbers": "rewind"}
    add("stop", bad(BAD))
    add("too many", bad(3, 5, 8), **skip, training__max_bad_steps=2)
    add("no checkpoint", bad(3), **rewind)
    add("machine", bad(BAD, **WEIGHT), **skip)
    add("undisturbed", bad(BAD), **rewind)
    for saved in (False, True):
        name = "killed after" if saved else "killed before"
        add(f"{name}, first", bad(BAD), partial(injections.killed_at_rewind, saved=saved), at=name, **rewind)
        # The sample would be bad again if the run read it again.
        add(name, *([] if saved else [bad(BAD)]), at=name, **rewind)
    spikes = {**skip, **SPIKES, "training__num_steps": SPIKE_AT + 5}
    add("one go", bad(3, SPIKE_AT, factor=1e4), bad(5), **spikes)
    add("resumed, first", bad(3, SPIKE_AT, factor=1e4), bad(5), at="resumed", training__stop_at_step=17, **spikes)
    add("resumed", bad(SPIKE_AT, factor=1e4), at="resumed", **spikes)
    return run_jobs(folder / "endings", jobs)


def error(folder: Path, name: str) -> str:
    record = outcome(folder / name)
    assert (record["code"], record["reason"]) == (4, "not_finite")
    return record["error"]


@pytest.mark.slow
def test_stop_names_step_ranks_and_samples(endings: dict[str, Any], folder: Path) -> None:
    assert [run.code for run in endings["stop"]] == [4, 4]
    told = error(folder, "stop")
    for words in (f"step {BAD}: loss=nan", "The loss of rank 1 is not finite, on the samples mock-", "in the data"):
        assert words in told, told


@pytest.mark.slow
def test_too_many_bad_steps_end_the_run(endings: dict[str, Any], folder: Path) -> None:
    assert [run.code for run in endings["too many"]] == [4, 4]
    assert "more bad steps than training.max_bad_steps allows (2 in 100 steps)" in error(folder, "too many")
    assert outcome(folder / "too many")["step"] == 7
    assert [r["details"]["action"] for r in incidents(folder / "too many")] == ["skip", "skip", "stop"]


@pytest.mark.slow
def test_a_rewind_without_a_checkpoint_is_reported(endings: dict[str, Any], folder: Path) -> None:
    assert [run.code for run in endings["no checkpoint"]] == [4, 4]
    assert "no valid checkpoint to go back to" in error(folder, "no checkpoint")


@pytest.mark.slow
def test_a_fault_that_does_not_repeat_is_attributed_to_the_machine(endings: dict[str, Any], folder: Path) -> None:
    assert [run.code for run in endings["machine"]] == [0, 0]
    report = json.loads((folder / "machine" / "bad_steps" / f"step_{BAD:07d}.json").read_text())
    assert report["first"] is None
    assert "its norm, overflows, or suspect a fault of the machine" in report["began"], "the losses are the same"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["killed before", "killed after"])
def test_a_run_killed_during_a_rewind_repeats_its_decision(endings: dict[str, Any], folder: Path, name: str) -> None:
    assert [run.code for run in endings[name]] == [0, 0], endings[name][0].err
    found, expected = (read_tensors(checkpoint(folder / run, STEPS)) for run in (name, "undisturbed"))
    assert_same_bits(found, expected)


@pytest.mark.slow
def test_the_history_of_the_guard_survives_a_resume(endings: dict[str, Any], folder: Path) -> None:
    """Steps are skipped before and after the resume; the same spikes are detected as in an uninterrupted run."""
    assert [run.code for run in (*endings["one go"], *endings["resumed"])] == [0] * 4, endings["one go"][0].err
    last = SPIKE_AT + 5
    assert_same_bits(*(read_tensors(checkpoint(folder / name, last)) for name in ("one go", "resumed")))
    facts = [(checkpoint(folder / name, last) / "metadata.json").read_text() for name in ("one go", "resumed")]
    assert facts[0] == facts[1]
    assert len(json.loads(facts[0])["guard"]["loss"]) == last - 2, "all steps except the bad ones"
    assert json.loads(facts[0])["guard"]["bad_steps"] == [5, SPIKE_AT]
