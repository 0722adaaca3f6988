"""The time limit of a job: durations in Slurm's format, the start of the clock, and when to stop."""

import os
import subprocess
import sys
import time

import pytest

from dit.errors import ConfigError
from dit.monitoring import time_limit
from dit.monitoring.time_limit import MARGIN_S, SAVES, STEPS, TimeLimit, job_start, started_at
from dit.ranges import duration_s
from dit.settings import TrainingConfig


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("03:55:00", 14100),
        ("1-0", 86400),
        ("1-02:30", 86400 + 9000),
        ("2-00:00:01", 172801),
    ],
)
def test_durations_are_those_of_slurm(text, seconds):
    assert duration_s("x", text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:0", "-5", "1-", "a", "1:2:3:4", "1.5", "inf", "1-2-3", "٣", "9" * 30])
def test_other_texts_are_refused_with_the_name_of_the_setting(text):
    with pytest.raises(ConfigError, match=r"training\.time_limit=.*such as 03:55:00"):
        TrainingConfig(time_limit=text).validate()


def test_the_start_of_a_process_is_read_from_proc():
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert before - 0.1 <= started_at(process.pid) <= time.time() + 0.1
        process.communicate(b"\n")


def test_the_clock_starts_with_the_job(monkeypatch):
    """The start of the Slurm job; otherwise of torchrun, the parent of a rank; otherwise of this process."""
    monkeypatch.delenv("SLURM_JOB_START_TIME", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert job_start() == (pytest.approx(started_at(os.getpid()), abs=0.1), "start of the process")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert job_start() == (pytest.approx(started_at(os.getppid()), abs=0.1), "start of the torchrun")
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1700000000")
    assert job_start() == (1700000000.0, "SLURM_JOB_START_TIME")


def test_a_run_without_limit_never_stops():
    assert not TimeLimit(None).is_near(1e9)


@pytest.fixture
def now(monkeypatch):
    """The wall clock (a list of one number) at the start of a job; the monotonic clock is 900 s behind."""
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    now = [1000.0]
    monkeypatch.setattr(time_limit.time, "time", lambda: now[0])
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: now[0] - 900.0)
    return now


@pytest.mark.parametrize("change_s", [-36_000.0, 36_000.0])
def test_a_change_of_the_wall_clock_does_not_move_the_limit(now, monkeypatch, change_s):
    limit = TimeLimit("10")
    monkeypatch.setattr(time_limit.time, "time", lambda: now[0] + change_s)
    now[0] += 599.0 - MARGIN_S - STEPS
    assert not limit.is_near(0.0)
    now[0] += 1.0
    assert limit.is_near(0.0)


def test_a_limit_that_is_over_at_the_start_is_refused_with_the_start_of_the_job(now, monkeypatch):
    """Every attempt in a shell of an old job would train one step. A restart inside a job may: code 2 would end it."""
    now[0] += 599.0
    TimeLimit("10").check()
    now[0] += 86_400.0
    over = (
        r"training\.time_limit=10 of the job that began 1d00h ago \(SLURM_JOB_START_TIME\) is over.*; raise .*, unset"
    )
    with pytest.raises(ConfigError, match=over):
        TimeLimit("10").check()
    TimeLimit(None).check()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    TimeLimit("10").check()


def test_a_run_stops_while_three_steps_and_two_saves_fit(now):
    """The longest step so far counts, not the last step."""
    limit = TimeLimit("10")
    left = {}
    for step_s in (3.0, 30.0, 5.0, *[1.0] * 600):
        now[0] += step_s
        left[now[0]] = limit.is_near(40.0)
        if left[now[0]]:
            break
    assert limit.longest_step_s == 30.0
    needed = STEPS * 30.0 + SAVES * 40.0 + MARGIN_S
    assert "(SLURM_JOB_START_TIME), before which 190 s are reserved" in limit.reason()
    assert 1600.0 - needed <= now[0] < 1600.0 - needed + 1.0
    assert SAVES >= 1
    assert STEPS == 3
