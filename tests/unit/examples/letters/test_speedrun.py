"""A record of the race is refused if any of its claims is false."""

import ctypes
import sys
from dataclasses import replace

import pytest

from examples.letters.speedrun import SLOWER, Record, differences, trained

PR_GET_CHILD_SUBREAPER = 37  # of Linux's prctl
TRUE = Record(
    factory="letters_dit",
    overrides=[],
    ranks=2,
    revision="0" * 12,
    process_s=100.0,
    wall_s=60.0,
    steps=2100,
    data_sha256="d",
    reader_sha256="r",
    losses_sha256="l",
    weights_sha256="w",
    read=195,
    total=208,
    read_by_seed={},
    reader_accuracy=0.99,
    machine="2 cores of one",
    torch="2",
)


@pytest.mark.parametrize(
    ("name", "claimed"),
    [("total", 195), ("steps", 10), ("reader_accuracy", 0.5), ("read", 208), ("weights_sha256", "x")],
)
def test_every_false_claim_is_named(name, claimed):
    assert differences(TRUE, TRUE) == []
    (line,) = differences(replace(TRUE, **{name: claimed}), TRUE)
    assert line.startswith(f"{name}: claimed {claimed}, measured {getattr(TRUE, name)}: ")


def test_a_row_counts_the_seeds_that_reach_the_mark():
    record = replace(TRUE, read=208, read_by_seed={"1": 187, "2": 188, "3": 208})
    assert "| 3 of 4 (89.9% to 100.0%) |" in record.row()


def test_a_time_not_reproduced_on_the_same_machine_is_refused():
    """Other work on the machine changes the process time a little; times of another machine are not compared."""
    claimed = replace(TRUE, process_s=1.0)
    (line,) = differences(claimed, TRUE)
    assert line.startswith("process_s: claimed 1 s, measured 100 s: ")
    assert differences(claimed, replace(TRUE, machine="2 cores of another")) == []
    assert differences(replace(TRUE, process_s=900.0), TRUE) == []
    assert differences(TRUE, replace(TRUE, process_s=0.99 * SLOWER * TRUE.process_s)) == []
    assert len(differences(TRUE, replace(TRUE, process_s=1.01 * SLOWER * TRUE.process_s))) == 1


def test_time_of_a_process_that_outlives_the_training_counts(tmp_path):
    busy = "import time\nwhile time.process_time() < 1: pass"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {busy!r}])"]
    seconds, _ = trained(command, tmp_path / "log")
    assert seconds > 1
    adopts = ctypes.c_int(1)
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts))
    assert adopts.value == 0, "this process would adopt the orphans of later tests and never wait for them"
