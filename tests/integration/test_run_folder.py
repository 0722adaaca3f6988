"""A run folder has one owner, records the run and its outcome, and faults in it are reported."""

import json
import os
import shlex
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dit.monitoring.sinks import read_records, scalars_by_step
from tests.integration import actions
from tests.integration.runs import checkpoints, losses, mock, outcome
from tests.support import faults
from tests.support.ranks import Job, call, run_jobs

NONSENSE = (b"\0" * 200 + b"\n", b"[1]\n", b"\xff\xfe", b"[" * 100_000)


def overwrite_records(folder: Path, content: bytes) -> list[str]:
    """Overwrite all files of a run folder except checkpoints; return their names."""
    files = [path for path in [*folder.iterdir(), *(folder / "heartbeats").iterdir()] if path.is_file()]
    for path in files:
        path.write_bytes(content)
    return [path.name for path in files]


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """Runs on synthetic data, one after the other, in one start of two ranks."""
    jobs: dict[str, Job] = {}

    def add(name: str, at: Any = None, ranks: int = 1, fault: Any = None, **settings: Any) -> None:
        usual = {"training__num_steps": 4, "training__log_interval": 1, "checkpoint__interval": 2}
        usual["schedule__warmup_steps"] = 0
        arguments = mock(folder / (at or name), **{**usual, **settings})
        jobs[name] = call(actions.train, *arguments, ranks=ranks, fault=fault)

    reports = {"training__validation_interval": 2, "sampling__num_steps": 1, "checkpoint__keep_last": 1}
    add("first", at="run", training__sample_interval=4, **reports)
    jobs["before"] = Job(actions.contents, {"folder": folder / "run"})
    add("second process", at="run", ranks=2, fault=partial(faults.locked, folder / "run"), training__num_steps=9)
    add("second process, other mistakes", at="run", fault=partial(faults.locked, folder / "run"), model__num_layers=0)
    jobs["after"] = Job(actions.contents, {"folder": folder / "run"})
    add("resumed", at="run", training__stop_at_step=5, training__num_steps=6, **reports)
    add("no such place", at=Path("/proc/nope"))
    add("port", fault=faults.port_taken)
    add("deleted", fault=partial(faults.deleted, folder / "deleted"), checkpoint__interval=0)
    add("interrupted", fault=partial(faults.interrupted, 3))
    jobs["interrupted run"] = Job(actions.contents, {"folder": folder / "interrupted"})
    jobs["sealed"] = Job(faults.cut_off, {"folder": folder / "interrupted", "sealed": True})
    add("does not load", at="interrupted")
    add("start from", checkpoint__start_from=folder / "interrupted")
    drawing = ["--checkpoint", folder / "interrupted", "--out", folder / "none.png"]
    jobs["draw what does not load"] = call(actions.draw, *drawing)
    jobs["damaged"] = Job(faults.cut_off, {"folder": folder / "interrupted", "sealed": False})
    add("all damaged", at="interrupted")
    add("all damaged, must", at="interrupted", checkpoint__resume="must")
    add("anew", at="interrupted", checkpoint__resume="never")
    jobs["copy"] = Job(shutil.copytree, {"src": folder / "interrupted", "dst": folder / "nonsense"})
    for number, content in enumerate(NONSENSE):
        jobs[f"nonsense {number}"] = Job(overwrite_records, {"folder": folder / "nonsense", "content": content})
        add(f"after nonsense {number}", at="nonsense", training__num_steps=6 + 2 * number)
    return run_jobs(folder / "world", jobs)


def test_a_second_process_is_refused_and_changes_no_file(done: dict[str, Any]) -> None:
    """All ranks exit with the usage code, and the error names the owner, even if the settings have mistakes."""
    runs = [*done["second process"], done["second process, other mistakes"]]
    assert [run.code for run in runs] == [2, 2, 2], [run.err for run in runs]
    who = (
        f"is in use by process {json.loads(done['after'].pop('run.lock'))['pid']} on {socket.gethostname()}, started 2"
    )
    assert [who in run.err for run in runs] == [True, False, True]  # only rank 0 prints it
    done["before"].pop("run.lock")
    assert done["after"] == done["before"]


def test_a_run_ends_with_its_losses_and_the_sampling_command(done: dict[str, Any], folder: Path) -> None:
    """The printed losses equal those of `metrics.jsonl`, and the printed command draws samples."""
    records = scalars_by_step(read_records(folder / "run" / "metrics.jsonl"))
    held_out = {step: values["held_out/loss"] for step, values in records.items() if "held_out/loss" in values}
    assert sorted(held_out) == [2, 4]
    best = min(held_out, key=lambda step: held_out[step])
    continues = ", the same command without this training.stop_at_step continues the run"
    for name, start, step, end in (
        ("first", "finished step 4 of 4 after ", 4, ""),
        ("resumed", "stopped at step 5 of 6 after ", 5, continues),
    ):
        went, command = done[name].out.splitlines()[-2:]
        assert went.startswith(start)
        losses = f", loss {records[step]['loss']:.4f}, best held-out loss {held_out[best]:.4f} at step {best}"
        assert went.endswith(losses + end)
        words = shlex.split(command.removeprefix("draw from it: "))
        assert words == ["python", "-m", "launch.sample", "--checkpoint", str(folder / "run")]


def test_pictures_are_announced_and_deleted_checkpoints_are_not(done: dict[str, Any], folder: Path) -> None:
    (picture,) = (folder / "run" / "samples").rglob("*.png")
    assert f"step 4: samples {picture}\n" in done["first"].out
    assert checkpoints(folder / "run") == ["iter_0000005"]
    assert "deleted checkpoints" not in done["first"].out + (folder / "world" / "rank_0.log").read_text()


def test_every_attempt_has_its_environment(done: dict[str, Any], folder: Path) -> None:
    attempts = json.loads((folder / "run" / "env.json").read_text())
    assert len(attempts) == 2
    for attempt in attempts:
        assert attempt["packages"]["torch"] == torch.__version__
        assert (attempt["host"], attempt["world_size"]) == (socket.gethostname(), 1)
        assert (attempt["kernels"]["attention"], attempt["kernels"]["linears"]) == ("sdpa", "megatron")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("no such place", 2, ["training.run_dir=/proc/nope cannot be used", "choose another folder"]),
        ("port", 2, ["port ", "is in use", "torchrun --standalone"]),
        ("deleted", 5, ["metrics.jsonl was deleted, moved or replaced", "another training.run_dir"]),
        ("does not load", 5, ["rank_00000.safetensors cannot be read", "delete or restore the folder"]),
        ("start from", 5, ["rank_00000.safetensors cannot be read", "delete or restore the folder"]),
        ("draw what does not load", 5, ["rank_00000.safetensors cannot be read", "delete or restore the folder"]),
        ("all damaged", 5, ["none of the checkpoints", "(steps [2]) is valid", "checkpoint.resume=never"]),
        ("all damaged, must", 5, ["none of the checkpoints", "(steps [2]) is valid", "checkpoint.resume=never"]),
    ],
)
def test_a_mistake_is_one_line_with_its_code_and_cure(
    done: dict[str, Any], folder: Path, name: str, code: int, words: list[str]
) -> None:
    run = done[name]
    assert run.code == code
    assert run.err.startswith("error: ")
    assert run.err.count("\n") == 1
    for word in words:
        assert word in run.err
    if name in ("port", "deleted", "start from"):  # the other folders do not exist, or later runs used them
        assert outcome(folder / name)["code"] == code
        assert words[0] in outcome(folder / name)["error"]


def test_a_deleted_run_is_not_created_again(done: dict[str, Any], folder: Path) -> None:
    assert os.listdir(folder / "deleted").count("checkpoints") == 0
    assert outcome(folder / "deleted")["step"] == 3


def test_ctrl_c_exits_with_code_130_everywhere(done: dict[str, Any], folder: Path) -> None:
    """The process returns it, and `exit.json` records it."""
    assert done["interrupted"].code == 130
    assert done["interrupted"].err.startswith("interrupted; a training continues from its last checkpoint")
    record = json.loads(done["interrupted run"]["exit.json"])
    assert (record["code"], record["reason"], record["step"]) == (130, "interrupted", 2)


def test_damaged_checkpoints_stop_a_run_unless_a_new_start_is_requested(done: dict[str, Any], folder: Path) -> None:
    """The second run starts at step 0 and has the same losses as the first."""
    assert done["anew"].code == 0
    assert {step: len(values) for step, values in losses(folder / "interrupted").items()} == dict.fromkeys(
        range(1, 5), 1
    )
    assert outcome(folder / "interrupted")["code"] == 0


@pytest.mark.parametrize("number", range(len(NONSENSE)))
def test_damaged_records_do_not_end_a_run(done: dict[str, Any], number: int) -> None:
    names = {"config.yaml", "env.json", "exit.json", "metrics.jsonl", "rank_0.json", "run.lock", "run_id"}
    assert names <= set(done[f"nonsense {number}"])
    run = done[f"after nonsense {number}"]
    assert run.code == 0, run.err
    assert f"resumed at step {4 + 2 * number}" in run.out
