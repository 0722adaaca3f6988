"""Asynchronous saves write the same checkpoints as synchronous ones, and the run continues if a save fails."""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from dit.checkpoint.background.remote import OWNER
from dit.checkpoint.manifest import read_manifest, verify_folder
from dit.monitoring.sinks import read_records
from tests.integration import actions
from tests.integration.runs import checkpoint, checkpoints, losses, mock, outcome
from tests.support import faults, save_faults
from tests.support.ranks import Job, call, run_jobs

pytestmark = pytest.mark.slow

STEPS, INTERVAL = 8, 2
ALL = tuple(range(INTERVAL, STEPS + 1, INTERVAL))


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Any]:
    jobs: dict[str, Job] = {}

    def add(name: str, at: str = "", fault: Any = None, *, is_async: bool = True, **settings: Any) -> None:
        usual = {"training__num_steps": STEPS, "training__log_interval": 1, "schedule__warmup_steps": 0}
        usual |= {"checkpoint__interval": INTERVAL, "checkpoint__keep_last": 9, "training__validation_interval": 4}
        usual |= {"checkpoint__async_save": is_async, "data__dataset_size": 64}
        arguments = mock(folder / (at or name), **{**usual, **settings})
        jobs[name] = call(actions.train, *arguments, ranks=2, fault=fault)

    full, killed = partial(partial, save_faults.disk_full), partial(partial, save_faults.writer_killed)
    stopped = partial(partial, save_faults.writer_stopped)
    add("sync", is_async=False)
    add("async")
    add("sync, disk", is_async=False, fault=full((2, 4), 1))
    add("async, disk", fault=full((2, 4), 1))
    add("disk of rank 0", fault=full((2, 6), 0))
    add("full for good", fault=full(ALL, 0))
    add("last save", fault=full((8,), 1))
    add("killed", fault=killed((4,), 1))
    add("killed first", fault=killed((4,), 0))
    add("slow", fault=stopped((2,), 1, 1.5))
    add("watched", fault=stopped((2,), 1, 6.5), training__hang_timeout_s=4.0)
    add("hangs", fault=stopped((2,), 0), checkpoint__save_timeout_s=1.0)
    add("stopped", fault=partial(faults.together, partial(faults.terminated, 5), stopped((4,), 1, 0.7)))
    add("stopped, again", at="stopped")
    add("nan", fault=partial(faults.not_a_number, 5, 0, folder / "nan.pt"))
    add("late", fault=partial(save_faults.out_of_time, 7200.0), training__time_limit="01:59:00")
    add("late, again", at="late")
    there = f"file://{folder}/elsewhere"
    add("copied", checkpoint__copy_to=f"{there}/a", training__stop_at_step=5, checkpoint__keep_last=1)
    sibling = {"checkpoint__copy_to": f"{there}/a", "checkpoint__keep_last": 1}
    add("sibling", **sibling, optimizer__lr=3e-4)
    add("other seed", **sibling, training__seed=5)
    apart = {**sibling, "checkpoint__copy_to": f"{there}/c", "training__seed": 5, "training__num_steps": INTERVAL}
    add("other seed, own address", at="other seed", **apart)
    jobs["disk lost"] = Job(shutil.move, {"src": folder / "copied", "dst": folder / "lost"})
    add("copied, again", at="copied", checkpoint__copy_to=f"{there}/a", checkpoint__keep_last=1)
    add("copied, alone", is_async=False, checkpoint__copy_to=f"{there}/b")
    add("no copies", checkpoint__copy_to="file:///proc/nowhere", checkpoint__resume="auto")
    return run_jobs(folder / "world", jobs)


def log_of(folder: Path, name: str, rank: int = 0) -> str:
    """Return the log of a rank during one job."""
    parts = re.split(r"^--- (.*)$", (folder / "world" / f"rank_{rank}.log").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))[name]


def saved(folder: Path, name: str) -> list[int]:
    """Return the steps of a run's checkpoints, which must all verify; there may be no other files."""
    names = checkpoints(folder / name)
    for one in names:
        verify_folder(folder / name / "checkpoints" / one)
    return [int(one.removeprefix("iter_")) for one in names]


def copies(there: Path) -> dict[str, bytes]:
    """Return the content of all copies in a folder."""
    return {name: content for name, content in actions.contents(there).items() if name != OWNER}


def codes(ended: dict[str, Any], name: str) -> list[int]:
    return [run.code for run in ended[name]]


@pytest.mark.parametrize("step", ALL)
def test_a_background_save_equals_a_synchronous_save(ended: dict[str, Any], folder: Path, step: int) -> None:
    """All files are equal to the byte, except the intended settings. Both get held-out losses."""
    assert codes(ended, "sync") == codes(ended, "async") == [0, 0], ended["async"][0].err
    one, other = (actions.contents(checkpoint(folder / name, step)) for name in ("sync", "async"))
    assert one.keys() == other.keys()
    for name in one.keys() - {"manifest.json", "config.yaml"}:
        assert one[name] == other[name], name
    settings = [yaml.safe_load(files["config.yaml"]) for files in (one, other)]
    for record in settings:
        del record["training"]["run_dir"], record["checkpoint"]["async_save"]
    assert settings[0] == settings[1]
    manifests = [read_manifest(checkpoint(folder / name, step)) for name in ("sync", "async")]
    assert manifests[0].meta == {**manifests[1].meta, "run": manifests[0].run}
    assert (manifests[0].held_out_loss is not None) == (step % 4 == 0)
    assert losses(folder / "async") == losses(folder / "sync")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sync, disk", [6, 8]), ("async, disk", [6, 8]), ("disk of rank 0", [4, 8]), ("hangs", [4, 6, 8])],
)
def test_a_save_that_fails_leaves_training_running(
    ended: dict[str, Any], folder: Path, name: str, expected: list[int]
) -> None:
    """The failure is logged as an error with a count; the losses are those of a run without failures."""
    assert codes(ended, name) == [0, 0], ended[name]
    assert saved(folder, name) == expected
    assert losses(folder / name) == losses(folder / "sync")
    assert log_of(folder, name).count("SAVE FAILED (1 in a row, the run ends after 3)") == len(
        {"sync, disk": "1", "async, disk": "1", "disk of rank 0": "12", "hangs": "1"}[name]
    )
    incidents = [r for r in read_records(folder / name / "metrics.jsonl") if r["kind"] == "incident"]
    assert {r["step"] for r in incidents} == set(ALL) - set(expected)
    assert ("SAVE FAILED (2 in a row" in log_of(folder, name)) == (", disk" in name)
    if "disk" in name:
        assert "File too large" in log_of(folder, name, 0 if name == "disk of rank 0" else 1)
    else:
        assert any("save_timeout_s=1" in log_of(folder, name, rank) for rank in range(2))  # the first rank to detect it


def test_three_failures_in_a_row_end_the_run_on_all_ranks(ended: dict[str, Any], folder: Path) -> None:
    name = "full for good"
    assert codes(ended, name) == [6, 6]
    assert (outcome(folder / name)["code"], outcome(folder / name)["reason"]) == (6, "save")
    assert outcome(folder / name)["step"] >= 6
    assert saved(folder, name) == []


def test_the_last_save_must_succeed(ended: dict[str, Any], folder: Path) -> None:
    assert codes(ended, "last save") == [6, 6]
    assert saved(folder, "last save") == [2, 4, 6]


@pytest.mark.parametrize("name", ["killed", "killed first"])
def test_a_killed_writer_costs_one_checkpoint_at_most(ended: dict[str, Any], folder: Path, name: str) -> None:
    assert codes(ended, name) == [0, 0], ended[name]
    assert [step for step in saved(folder, name) if step != 4] == [2, 6, 8]
    assert losses(folder / name) == losses(folder / "sync")
    rank = 1 if name == "killed" else 0
    assert ("was killed by SIGKILL" in log_of(folder, name, rank)) == (4 not in saved(folder, name))


def test_a_save_waits_for_the_previous_save(ended: dict[str, Any], folder: Path) -> None:
    assert codes(ended, "slow") == [0, 0]
    assert "step 4: waiting for the checkpoint of step 2, which is still being written" in log_of(folder, "slow")
    assert saved(folder, "slow") == list(ALL)


def test_waiting_for_a_save_is_not_a_hang(ended: dict[str, Any], folder: Path) -> None:
    """Saves have a separate limit, `checkpoint.save_timeout_s`."""
    assert codes(ended, "watched") == [0, 0], ended["watched"]
    assert saved(folder, "watched") == list(ALL)


def test_a_stopped_run_waits_for_the_current_save_and_the_last_save(ended: dict[str, Any], folder: Path) -> None:
    assert codes(ended, "stopped") == [75, 75]
    assert codes(ended, "stopped, again") == [0, 0]
    assert "resumed at step 5" in ended["stopped, again"][0].out
    assert saved(folder, "stopped") == [2, 4, 5, 6, 8]
    assert losses(folder / "stopped") == losses(folder / "sync")


def test_a_failed_run_finishes_its_save(ended: dict[str, Any], folder: Path) -> None:
    assert codes(ended, "nan") == [4, 4]
    assert saved(folder, "nan") == [2, 4]


def test_a_run_stops_before_its_time_limit_and_resumes(ended: dict[str, Any], folder: Path) -> None:
    """All ranks return the exit code for requeueing."""
    assert codes(ended, "late") == [75, 75]
    assert outcome(folder / "late")["code"] == 0
    assert "resumed at step 1" in ended["late, again"][0].out
    assert saved(folder, "late") == [1, *ALL]
    assert losses(folder / "late") == losses(folder / "sync")


def test_a_run_without_its_disk_resumes_from_its_copies(ended: dict[str, Any], folder: Path) -> None:
    """The losses are those of an undisturbed run, and the copies equal the kept checkpoints to the byte."""
    assert codes(ended, "copied") == [75, 75]
    assert codes(ended, "copied, again") == [0, 0], ended["copied, again"][0].err
    assert "fetching checkpoint of step 5" in log_of(folder, "copied, again")
    assert "resumed at step 5" in ended["copied, again"][0].out
    assert saved(folder, "copied") == [8]
    assert losses(folder / "lost") | losses(folder / "copied") == losses(folder / "sync")
    ids = [(folder / name / "run_id").read_text() for name in ("lost", "copied")]
    assert ids[0] == ids[1] == f"{read_manifest(checkpoint(folder / 'copied', 8)).run}\n"
    assert copies(folder / "elsewhere" / "a") == actions.contents(folder / "copied" / "checkpoints")


@pytest.mark.parametrize(
    ("name", "change"), [("sibling", " -> 0.0003; training.run_dir: "), ("other seed", "training.seed: 1234 -> 5")]
)
def test_another_run_does_not_use_the_copies(ended: dict[str, Any], folder: Path, name: str, change: str) -> None:
    """The run is refused before it copies anything, so with another address it starts from step 0."""
    assert codes(ended, name) == [2, 2]
    run = (folder / "lost" / "run_id").read_text().strip()
    for words in (f"/elsewhere/a has the copies of run {run} in training.run_dir={folder / 'copied'}", change):
        assert words in ended[name][0].err
    assert f"training.run_dir: {folder / 'copied'} -> {folder / name}" in ended[name][0].err
    if name == "sibling":
        assert not (folder / name / "checkpoints").exists()
    assert codes(ended, "other seed, own address") == [0, 0]
    assert "resumed" not in ended["other seed, own address"][0].out


def test_synchronous_saves_are_copied_with_their_held_out_losses(ended: dict[str, Any], folder: Path) -> None:
    assert codes(ended, "copied, alone") == [0, 0]
    there = folder / "elsewhere" / "b"
    assert [int(path.name.removeprefix("iter_")) for path in sorted(there.glob("iter_*"))] == list(ALL)
    assert copies(there) == actions.contents(folder / "copied, alone" / "checkpoints")
    assert read_manifest(there / "iter_0000008").held_out_loss is not None


def test_failed_copies_are_an_error_after_the_last_step(ended: dict[str, Any], folder: Path) -> None:
    assert codes(ended, "no copies") == [6, 6]
    assert saved(folder, "no copies") == list(ALL)
    assert losses(folder / "no copies") == losses(folder / "sync")
    assert "COPY FAILED of checkpoint of step" in log_of(folder, "no copies")
    incidents = [r["incident"] for r in read_records(folder / "no copies" / "metrics.jsonl") if r["kind"] == "incident"]
    assert set(incidents) == {"copy_failed"}
    assert "copy_to=file:///proc/nowhere" in ended["no copies"][0].err
