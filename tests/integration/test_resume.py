"""A run on real data, stopped in every way and started again, has the numbers of an uninterrupted run."""

import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dit.checkpoint.checkpointer import read_loader_state
from dit.monitoring.sinks import read_records
from tests.integration import actions
from tests.integration.runs import (
    assert_same_bits,
    checkpoint,
    checkpoints,
    held_out,
    kill_session,
    letters,
    loss_values,
    losses,
    outcome,
    read_tensors,
    scalars,
    started,
    steps_logged,
    wait_for,
)
from tests.support import faults
from tests.support.ranks import Job, run_jobs

pytestmark = pytest.mark.slow

NUM_STEPS = 24
INTERVAL = 2
SEED = 20
ROUNDING = 1e-5  # relative, fp32: sums in another order
BF16_RTOL = 2e-2  # a few ulps of bf16
SETTINGS = {
    "training__num_steps": NUM_STEPS,
    "training__validation_interval": 6,
    "checkpoint__interval": INTERVAL,
}
BF16 = {
    "training__num_steps": 8,
    "training__log_interval": 3,
    "checkpoint__interval": 4,
    "training__precision": "bf16",
}

Command = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def command(letters_data: Path, folder: Path) -> Command:
    """Return a function from the name of a run to its arguments; runs differ only in their folders."""
    return lambda name: letters(letters_data, folder / name, **SETTINGS)


@pytest.fixture(scope="module")
def jobs(letters_data: Path, folder: Path, command: Command) -> "Future[dict[str, Any]]":
    """Runs in a worker process, concurrent with the killed runs: uninterrupted, signalled, and in bf16."""
    bf16 = partial(letters, letters_data, **BF16)
    runs = {
        "uninterrupted": Job(actions.train, {"arguments": command("uninterrupted")}),
        "asked": Job(actions.train, {"arguments": command("asked"), "fault": partial(faults.terminated, 7)}),
        "asked again": Job(actions.train, {"arguments": command("asked")}),
        "bf16": Job(actions.train, {"arguments": bf16(folder / "bf16")}),
        "bf16 stopped": Job(actions.train, {"arguments": bf16(folder / "bf16_stopped", training__stop_at_step=4)}),
        "bf16 again": Job(actions.train, {"arguments": bf16(folder / "bf16_stopped")}),
    }
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_jobs, folder / "world", runs)


def assert_same_run(found: Path, expected: Path, step: int) -> None:
    """Compare every logged loss, the tensors of the checkpoint at `step`, and the position in the data."""
    assert losses(found) == losses(expected)
    assert held_out(found) == held_out(expected)
    assert_same_bits(read_tensors(checkpoint(found, step)), read_tensors(checkpoint(expected, step)))
    assert same(read_loader_state(checkpoint(found, step)), read_loader_state(checkpoint(expected, step)))


def same(a: Any, b: Any) -> bool:
    """Compare nested containers of tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_killed_runs_equal_an_uninterrupted_run(command: Command, folder: Path, jobs: "Future[dict[str, Any]]") -> None:
    """Kill -9 at a random moment, then during a save; the same command resumes every time."""
    rng = random.Random(SEED)
    run_dir, arguments = folder / "killed", command("killed")

    log = folder / "killed_1.log"
    first = rng.randrange(3, 9)
    with started(arguments, log) as process:
        wait_for(process, lambda: steps_logged(run_dir) >= first, log)
        kill_session(process)
    died_at = steps_logged(run_dir)
    assert first <= died_at < NUM_STEPS
    assert not (run_dir / "exit.json").exists()

    log = folder / "killed_2.log"
    second = died_at + rng.randrange(3, 8)
    with started(arguments, log) as process:
        partial_folder = stop_while_saving(process, run_dir, second, log)
        kill_session(process)
    assert partial_folder.is_dir()
    assert second <= steps_logged(run_dir) < NUM_STEPS

    log = folder / "killed_3.log"
    with started(arguments, log) as process:
        assert process.wait(timeout=240) == 0, log.read_text()
    assert "resumed at step" in log.read_text()
    assert outcome(run_dir)["reason"] == "completed"
    assert checkpoints(run_dir) == [checkpoint(run_dir, NUM_STEPS - INTERVAL).name, checkpoint(run_dir, NUM_STEPS).name]
    attempts = {record["attempt"] for record in read_records(run_dir / "metrics.jsonl")}
    assert attempts == {1, 2, 3}

    assert jobs.result()["uninterrupted"].code == 0
    assert len(losses(folder / "uninterrupted")) == NUM_STEPS
    assert_same_run(run_dir, folder / "uninterrupted", NUM_STEPS)


def stop_while_saving(process: subprocess.Popen, run_dir: Path, step: int, log: Path) -> Path:
    """Stop the process group while a checkpoint at `step` or later is half-written; return the checkpoint's folder."""
    while True:
        wait_for(process, lambda: steps_logged(run_dir) >= step and any(run_dir.glob("checkpoints/*.tmp")), log)
        os.killpg(process.pid, signal.SIGSTOP)
        unfinished = list(run_dir.glob("checkpoints/*.tmp"))
        if unfinished and any(unfinished[0].iterdir()):
            return unfinished[0]
        os.killpg(process.pid, signal.SIGCONT)


def test_a_signalled_run_saves_and_resumes_later(folder: Path, jobs: "Future[dict[str, Any]]") -> None:
    """After SIGTERM, the run saves and stops at the end of the current or the next step."""
    ended = jobs.result()
    assert (ended["asked"].code, ended["asked again"].code) == (75, 0)
    assert re.search("resumed at step [78]", ended["asked again"].out)
    assert_same_run(folder / "asked", folder / "uninterrupted", NUM_STEPS)


def test_torchrun_forwards_the_signal_and_two_ranks_resume(
    command: Command, folder: Path, jobs: "Future[dict[str, Any]]"
) -> None:
    """SIGUSR1 to torchrun, as Slurm sends it: all ranks stop at the same step, and have the losses of one rank.

    Exit code 75 of the ranks is in exit.json; torchrun itself returns 1.
    """
    run_dir, arguments, log = folder / "two_ranks", command("two_ranks"), folder / "two_ranks.log"
    with started(arguments, log, ranks=2, torchrun=["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]) as process:
        wait_for(process, lambda: steps_logged(run_dir) >= 3, log)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=240) == 1
    ended = outcome(run_dir)
    assert (ended["code"], ended["reason"]) == (75, "preempted"), log.read_text()
    assert 3 <= ended["step"] < NUM_STEPS
    assert checkpoints(run_dir)[-1] == checkpoint(run_dir, ended["step"]).name

    with started(arguments, log, ranks=2) as process:
        assert process.wait(timeout=240) == 0, log.read_text()
    assert f"resumed at step {ended['step']}" in log.read_text()
    assert outcome(run_dir)["code"] == 0
    jobs.result()
    assert loss_values(run_dir) == pytest.approx(loss_values(folder / "uninterrupted"), rel=ROUNDING)
    assert len(loss_values(run_dir)) == NUM_STEPS


def test_bf16_trains_on_cpu_with_fp32_masters_and_resumes_to_the_bit(
    command: Command, folder: Path, jobs: "Future[dict[str, Any]]"
) -> None:
    ended = jobs.result()
    assert [ended[name].code for name in ("bf16", "bf16 stopped", "bf16 again")] == [0, 75, 0]
    found, exact = loss_values(folder / "bf16"), loss_values(folder / "uninterrupted")
    assert found[0] == pytest.approx(sum(exact[:3]) / 3, rel=BF16_RTOL)
    assert_same_run(folder / "bf16_stopped", folder / "bf16", 8)
    for name, tensor in read_tensors(checkpoint(folder / "bf16", 8)).items():
        slot = name.partition(".")[0]
        # Weights that are updated in bf16 would still be bf16 numbers after eight steps.
        if slot in ("weight", "ema") and tensor.numel() > 1000:
            assert not torch.equal(tensor, tensor.bfloat16().float()), name


def test_counts_between_two_log_lines_survive_a_stop(folder: Path, jobs: "Future[dict[str, Any]]") -> None:
    """There is a log line every three steps and before each checkpoint."""
    jobs.result()
    assert scalars(folder / "bf16_stopped", "consumed_samples") == {step: 8 * step for step in (3, 4, 6, 8)}
    assert scalars(folder / "bf16", "consumed_samples") == scalars(folder / "bf16_stopped", "consumed_samples")
