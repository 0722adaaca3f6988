"""A run that stops, fails or starts with other settings at an awkward moment loses no step and no record."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from dit.checkpoint.checkpointer import read_loader_state
from dit.checkpoint.manifest import read_manifest
from dit.monitoring.sinks import read_records
from tests.integration.runs import checkpoint, checkpoints, held_out, losses, outcome, scalars, training
from tests.support import faults
from tests.support.ranks import Job, run_jobs

LOOP = {
    **{"data__shapes": '["1x4x4","1x4x8","1x8x8"]', "data__max_tokens_per_pack": 32, "data__pack_multiple_of": 4},
    **{"model__hidden_size": 32, "model__num_layers": 1, "model__num_attention_heads": 2, "schedule__warmup_steps": 2},
    **{"training__num_steps": 12, "training__validation_interval": 6, "logging__tensorboard": False},
    **{"checkpoint__interval": 3, "checkpoint__keep_last": 9},
}
"""A run on packs of images of three sizes."""
# All changes are refused, except that of the number of steps.
OTHERS = {
    "objective": ("objective: FlowMatching -> EDM", {"objective": "edm"}),
    "seed": ("training.seed: 1234 -> 7", {"training__seed": 7, "training__num_steps": 5}),
    "model": ("model.time_scale: 1000.0 -> 5.0", {"model__time_scale": 5}),
    "data": ("data.dataset_size: None -> 64", {"data__dataset_size": 64}),
}
ACCEPTED = {
    "training__num_steps": 4,
    "optimizer__beta1": 0.8,
    "data__dataset_size": 64,
    "checkpoint__accept_changes": '["optimizer.beta1","data"]',
}


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Any]:
    jobs: dict[str, Job] = {}

    def add(name: str, at: str = "", ranks: int = 1, fault: Any = None, **settings: Any) -> None:
        jobs[name] = training("tiny_dit_pack", folder / (at or name), ranks, fault, **{**LOOP, **settings})

    inside, store = partial(partial, faults.terminated_inside), "dit.checkpoint.store.CheckpointStore"
    loop = "dit.training.pretrain"
    add("uninterrupted", fault=partial(faults.flushes_counted, folder / "uninterrupted", folder / "flushes.json"))
    # Stops between two validations, and where validation is due: in the step, and during the save.
    for name, fault in {
        "between": partial(faults.terminated, 7),
        "in the step": partial(faults.terminated, 6),
        "in the save": inside(f"{store}.publish", 2),
    }.items():
        add(name, fault=fault)
        add(f"{name}, again", at=name)
    # Validation and pictures are due at the last step, but the run has received a signal.
    last = {"checkpoint__interval": 0, "training__num_steps": 6, "training__sample_interval": 6}
    stuck = partial(faults.stuck_inside, f"{store}.newest_first", 9.0)
    add("last save", fault=partial(faults.together, inside(f"{store}.publish"), stuck), **last)
    add("last save, again", at="last save", **last)
    add("looks fail", fault=partial(faults.out_of_memory, f"{loop}.Run.validate"))
    unwritten = partial(faults.out_of_memory, "dit.inference.preview.save_png")
    add("pictures fail", fault=unwritten, training__sample_interval=3)
    add("pictures fail, again", at="pictures fail", training__sample_interval=3)
    add("no pictures", sampling__num_steps=0)
    # Signals before the first step, of a new run and of resumed ones.
    short = {"at": "finished", "training__num_steps": 3}
    add("finished", **short)
    add("building", ranks=2, fault=inside(f"{loop}.build_state"))
    add("hashing", at="finished", fault=inside(f"{store}.newest_first"), training__num_steps=9)
    add("loading", at="finished", fault=inside("dit.checkpoint.checkpointer.load_state"), training__num_steps=9)
    for name, (_, settings) in OTHERS.items():
        add(name, **{**short, **settings})
    add("no room", **short, fault=partial(faults.no_room_for_logs, 100))
    jobs["refused"] = Job(Path.read_text, {"self": folder / "finished" / "config.yaml"})
    add("accepted", **{**short, **ACCEPTED})
    return run_jobs(folder / "world", jobs)


def described(checkpoint_folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata of a checkpoint in its manifest, and its metadata for sampling."""
    metadata = json.loads((checkpoint_folder / "metadata.json").read_text())
    return {**read_manifest(checkpoint_folder).meta, "run": ""}, metadata


@pytest.mark.parametrize(("name", "step"), [("between", 7), ("in the step", 6), ("in the save", 6)])
def test_a_resumed_run_has_its_held_out_loss_and_its_largest_sample(
    ended: dict[str, Any], folder: Path, name: str, step: int
) -> None:
    """Validation results and all checkpoint metadata equal those of the undisturbed run at every step."""
    assert (ended[name].code, ended[f"{name}, again"].code, ended["uninterrupted"].code) == (75, 0, 0)
    stopped = {record["step"] for record in read_records(folder / name / "metrics.jsonl") if record["attempt"] == 1}
    assert max(stopped) == step
    assert losses(folder / name) == losses(folder / "uninterrupted")
    assert held_out(folder / name) == held_out(folder / "uninterrupted")
    for saved in (3, 6, 9, 12):
        assert described(checkpoint(folder / name, saved)) == described(checkpoint(folder / "uninterrupted", saved))


@pytest.mark.parametrize(("name", "step"), [("between", 7), ("in the step", 6), ("in the save", 6), ("last save", 6)])
def test_a_signal_is_recorded_once(ended: dict[str, Any], folder: Path, name: str, step: int) -> None:
    """Also one that arrives during a save."""
    records = [record for record in read_records(folder / name / "metrics.jsonl") if record["kind"] == "incident"]
    signals = [(record["step"], record["details"]) for record in records if record["incident"] == "signal"]
    assert signals == [(step, {"signal": "SIGTERM"})]
    assert f"step {step}: stops for SIGTERM" in ended[name].out


def test_a_checkpoint_records_the_step_of_its_held_out_loss(ended: dict[str, Any], folder: Path) -> None:
    measured = {step: values.pop() for step, values in held_out(folder / "uninterrupted").items()}
    assert list(measured) == [6, 12]
    manifests = {step: read_manifest(checkpoint(folder / "uninterrupted", step)) for step in (3, 6, 9, 12)}
    found = {step: (m.meta["held_out_loss"], m.meta["held_out_step"]) for step, m in manifests.items()}
    assert found == {3: (None, None), 6: (measured[6], 6), 9: (measured[6], 6), 12: (measured[12], 12)}
    assert [m.held_out_loss for m in manifests.values()] == [None, measured[6], None, measured[12]]


def test_a_stop_signal_during_the_last_save_defers_validation_and_pictures(ended: dict[str, Any], folder: Path) -> None:
    """The save finishes, and the next start validates and draws without a step."""
    assert [ended[name].code for name in ("last save", "last save, again")] == [75, 0], ended["last save"].err
    assert "held-out loss" not in ended["last save"].out
    assert [outcome(folder / "last save")[key] for key in ("code", "reason", "step")] == [0, "completed", 6]
    assert checkpoints(folder / "last save") == ["iter_0000006"]
    assert list(held_out(folder / "last save")) == [6]
    assert (folder / "last save" / "samples" / "step_0000006").is_dir()


def test_a_hanging_start_writes_its_stacks(ended: dict[str, Any], folder: Path) -> None:
    """Here the search for a checkpoint is only slow, so the run continues normally."""
    stacks = (folder / "last save" / "stacks" / "rank_0.txt").read_text()
    assert " in resume\n" in stacks
    assert ended["last save"].code == 75


def test_a_stop_signal_before_the_first_step_stops_the_run_at_once(ended: dict[str, Any], folder: Path) -> None:
    """Nothing is logged or saved, on one rank and on two, in a new run and in a resumed one."""
    assert [run.code for run in ended["building"]] == [75, 75]
    for name in ("hashing", "loading"):
        assert ended[name].code == 75
        assert "Traceback" not in ended[name].err
    assert [outcome(folder / "building")[key] for key in ("code", "reason", "step")] == [75, "preempted", None]
    left = ["exit.json", "heartbeats", "run.lock", "stacks"]
    assert sorted(path.name for path in (folder / "building").iterdir()) == left
    assert max(scalars(folder / "finished", "loss")) == 4, "they were to go on to step 9"


@pytest.mark.parametrize(("name", "step"), [("looks fail", 6), ("pictures fail", 3)])
def test_failed_validation_or_sampling_loses_no_step(ended: dict[str, Any], folder: Path, name: str, step: int) -> None:
    assert ended[name].code == 70
    assert "error: tried to allocate 20.00 GiB; lower training.micro_batch_size or" in ended[name].err
    assert checkpoint(folder / name, step).name in checkpoints(folder / name)
    assert read_manifest(checkpoint(folder / name, step)).meta["consumed_samples"] > 0


def test_the_next_start_draws_pictures_that_were_not_written(ended: dict[str, Any], folder: Path) -> None:
    assert ended["pictures fail, again"].code == 0
    assert [path.name for path in (folder / "pictures fail" / "samples" / "step_0000003").iterdir()] == ["ema.png"]


def test_impossible_pictures_are_refused_at_once(ended: dict[str, Any], folder: Path) -> None:
    assert ended["no pictures"].code == 2
    assert "sampling.num_steps=0 must be a whole number of at least 1" in ended["no pictures"].err
    left = {path.name for path in (folder / "no pictures").iterdir() if not path.name.startswith("exit.")}
    assert left == {"run.lock"}


def test_metrics_are_written_before_the_checkpoint(ended: dict[str, Any], folder: Path) -> None:
    """So a resume does not write lines again that are older than its checkpoint."""
    found = json.loads((folder / "flushes.json").read_text())
    assert len(found) == 4
    for flushed, size in found:
        assert flushed == size > 0


@pytest.mark.parametrize("name", OTHERS)
def test_another_experiment_is_refused_also_by_a_finished_run(ended: dict[str, Any], folder: Path, name: str) -> None:
    """The error has both values and the solution; the recorded settings in the run folder do not change."""
    assert ended[name].code == 2
    change, _ = OTHERS[name]
    settings = f"iter_0000003 was trained with other settings or data: {change}. "
    assert all(words in ended[name].err for words in (settings, "checkpoint.start_from", "run_dir"))
    assert f"'checkpoint.accept_changes=[\"{change.partition(':')[0]}\"]'" in ended[name].err
    assert "num_steps" not in ended[name].err


def test_a_failed_write_keeps_the_previous_record(ended: dict[str, Any], folder: Path) -> None:
    """After refused attempts and a failed write, the recorded settings are still those of the checkpoint."""
    assert ended["no room"].code == 5
    assert f"{folder / 'finished' / 'config.yaml'} cannot be written" in ended["no room"].err
    assert "Traceback" not in ended["no room"].err
    assert ended["refused"] == (checkpoint(folder / "finished", 3) / "config.yaml").read_text()


def test_accepted_changes_are_listed_and_the_data_restart(ended: dict[str, Any], folder: Path) -> None:
    """The model continues to step four; the data restart and have read only one step."""
    assert ended["accepted"].code == 0, ended["accepted"].err
    log = (folder / "world" / "rank_0.log").read_text()
    for line in (
        "changed since step 3: training.num_steps: 3 -> 4",
        "changed since step 3: optimizer.beta1: 0.9 -> 0.8",
        "changed since step 3: data.dataset_size: None -> 64",
        "the data start afresh at step 3",
    ):
        assert log.count(f"{line}\n") >= 1, line
    record = yaml.safe_load((folder / "finished" / "config.yaml").read_text())
    assert (record["optimizer"]["beta1"], record["data"]["dataset_size"]) == (0.8, 64)
    assert record == yaml.safe_load((checkpoint(folder / "finished", 4) / "config.yaml").read_text())
    taken = [
        {stream: state["position"]["taken"] for stream, state in read_loader_state(path)["streams"].items()}
        for path in (checkpoint(folder / "finished", 3), checkpoint(folder / "finished", 4))
    ]
    assert all(2 * taken[1][stream] <= taken[0][stream] for stream in taken[0]), taken
    assert max(scalars(folder / "finished", "consumed_samples")) == 4
