"""Output of `launch.status` for a run folder, from records written by hand."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dit.monitoring.exit_record import Outcome, write_outcome
from dit.monitoring.run_lock import RunLock
from dit.monitoring.run_log import how_it_went
from launch.status import lines, main, read_status

NOW = 1_800_000_000.0


def record(kind: str, step: int, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "time": NOW + 2.0 * step, "attempt": 1, **values}


def scalars(step: int, loss: Any = 1.0, **values: Any) -> dict[str, Any]:
    rates = {"samples_per_s": 32.0, "data_wait_share": 0.25, "loader_samples_per_s": 90.0, "dropped_samples": 3}
    ranks = {"rank_s_median": 0.5, "rank_s_slowest": 1.0, "slowest_rank": 5}
    gib = 2**30
    ranks |= {"peak_memory_allocated_bytes": 45 * gib, "peak_memory_reserved_bytes": 50.5 * gib, "mfu": 0.41}
    ranks |= {"grad_norm/head": 0.5, "grad_norm/layers.mlp": 1.5}
    more = {"grad_norm": 0.1 * step, "consumed_samples": 64 * step, **rates, **ranks, **values}
    return record("scalars", step, loss=loss, **more)


def run_folder(folder: Path, *records: dict[str, Any], num_steps: int = 40) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"training: {{num_steps: {num_steps}}}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in records))
    return folder


def told(folder: Path) -> dict[str, str]:
    """Return the text of each line by the line's first word."""
    found = lines(read_status(folder))
    assert len(found) == 11
    return {"run": found[0], **{line.split()[0]: line[12:] for line in found[1:]}}


@pytest.fixture
def half_done(tmp_path: Path) -> Path:
    falling = [scalars(step, loss=2.0 if step <= 10 else 1.0) for step in range(1, 21)]
    held_out = [record("scalars", step, **{"held_out/loss": loss}) for step, loss in ((10, 0.5), (20, 0.75))]
    bad = record("incident", 7, incident="spike", details={"reason": "grad_norm=9", "action": "skip", "ranks": [1]})
    return run_folder(tmp_path / "half", *falling, *held_out, bad)


def test_the_status_of_a_killed_run_has_its_lines(half_done: Path) -> None:
    saved = half_done / "checkpoints" / "iter_0000016"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    os.utime(saved / "manifest.json", (time.time() - 180, time.time() - 180))
    (half_done / "checkpoints" / "iter_0000020.tmp").mkdir()
    said = told(half_done)
    assert "ended without a record" in said["run"]
    assert said["step"] == "20 of 40 (50%), 1,280 samples, attempt 1"
    assert said["rate"] == "2 s per step, 32.0 samples/s, MFU 41.0%"
    assert said["memory"] == "peak of the fullest rank: 45.0 GiB allocated, 50.5 GiB reserved"
    assert said["loss"] == "1.0000, mean of the last 10 lines 1.0000, of the 10 before 2.0000"
    assert said["held-out"] == "0.7500 at step 20, best 0.5000 at step 10"
    assert said["grad"].endswith("the median 1.05, the largest 2; most of it in layers.mlp (1.5)")
    assert said["data"] == "waits 25.0% of the time, the loaders make 90 samples/s, 3 samples dropped"
    assert said["ranks"] == "compute 0.5 s of a step, the slowest 2.00 times the median (most often rank 5)"
    assert said["checkpoint"] == "step 16, 3m00s old; 4 steps since, 1 kept"
    assert said["incidents"] == "1 spike; the newest: step 7 spike (reason: grad_norm=9; action: skip)"


def test_the_status_of_a_running_run_has_its_lock_and_remaining_time(half_done: Path) -> None:
    with RunLock(half_done):
        said = told(half_done)
    assert f"running (process {os.getpid()} on " in said["run"]
    assert said["rate"].endswith(", ETA 40s")
    assert "ended" in told(half_done)["run"]


def test_the_status_of_a_starting_run_has_all_lines(tmp_path: Path) -> None:
    """It writes metrics.jsonl after it has built the model and read its checkpoint."""
    with RunLock(tmp_path / "run"):
        said = told(tmp_path / "run")
    assert f"running (process {os.getpid()} on " in said["run"]
    assert said["step"] == "0, attempt 1"


def test_a_finished_run_of_one_line_has_a_rate(tmp_path: Path) -> None:
    assert told(run_folder(tmp_path / "run", scalars(20), num_steps=20))["rate"] == "32.0 samples/s, MFU 41.0%"


def test_a_clock_that_is_set_back_does_not_change_the_rate(tmp_path: Path) -> None:
    """The interval in which it was set back has an unknown length, and is left out."""
    times = [NOW + 2.0 * step - (3600 if step > 7 else 0) for step in range(1, 11)]
    records = [{**scalars(step), "time": seconds} for step, seconds in enumerate(times, 1)]
    assert told(run_folder(tmp_path / "run", *records))["rate"].startswith("2 s per step")


def test_rates_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    """The run may have continued on other machines or under another layout."""
    slow = {
        "samples_per_s": 8.0,
        "mfu": 0.1,
        "data_wait_share": 0.5,
        "loader_samples_per_s": 9.0,
        "rank_s_slowest": 0.5,
    }
    records = [scalars(step) for step in range(1, 21)] + [{**scalars(21, **slow), "attempt": 2}]
    said = told(run_folder(tmp_path / "run", *records))
    assert said["rate"] == "8.0 samples/s, MFU 10.0%"
    assert said["data"].startswith("waits 50.0% of the time, the loaders make 9 samples/s")
    assert said["ranks"] == "compute 0.5 s of a step, the slowest 1.00 times the median"


def test_the_status_of_a_failed_run_has_its_error(half_done: Path) -> None:
    write_outcome(half_done, Outcome(4, "not_finite", 20, 1, "NotFiniteError: step 21: loss=nan", NOW))
    assert "not_finite (code 4): NotFiniteError: step 21: loss=nan" in told(half_done)["run"]


def test_a_run_that_failed_before_its_first_step_has_all_lines(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_outcome(tmp_path / "run", Outcome(2, "config", None, 0, "ConfigError: no"))
    said = told(tmp_path / "run")
    assert (said["step"], said["loss"], said["incidents"]) == ("0, attempt 1", "none yet", "none")


def publish(folder: Path, step: int, published: float) -> None:
    saved = folder / "checkpoints" / f"iter_{step:07d}"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    os.utime(saved / "manifest.json", (published, published))


def attempt(number: int, steps: range, loss: float, began: float) -> list[dict[str, Any]]:
    times = {"attempt": number, "grad_norm": loss}
    return [{**scalars(step, loss=loss, **times), "time": began + 2.0 * i} for i, step in enumerate(steps)]


def test_steps_of_a_killed_attempt_do_not_count(tmp_path: Path) -> None:
    """Killed at 90, resumed at 80, now at 82: the curve and the means use only the steps that still count."""
    killed = attempt(1, range(1, 91), 4.0, NOW)
    killed[80:] = attempt(1, range(81, 91), 900.0, NOW + 160)
    folder = run_folder(tmp_path / "run", *killed, *attempt(2, range(81, 83), 4.0, NOW + 1000))
    publish(folder, 80, NOW + 161)
    status = read_status(folder)
    assert max(status.series["loss"]) == status.step == 82
    said = told(folder)
    assert "lines 4.0000, of the 41 before 4.0000" in said["loss"]
    assert "the largest 4;" in said["grad"]
    assert "2 steps since" in said["checkpoint"]


def test_an_attempt_without_a_line_is_at_the_step_of_its_checkpoint(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", *attempt(1, range(1, 21), 1.0, NOW))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**record("incident", 16, incident="signal", details={}), "attempt": 2}) + "\n")
    publish(folder, 16, NOW + 33)
    said = told(folder)
    assert said["step"] == "16 of 40 (40%), 1,024 samples, attempt 2"
    assert "; 0 steps since" in said["checkpoint"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**scalars(18, loss=0.5), "attempt": 2}) + "\n")
    status = read_status(folder)
    assert status.step == 18
    assert list(status.series["loss"])[-2:] == [17, 18]


def test_an_attempt_that_has_logged_nothing_yet_drops_lost_steps(tmp_path: Path) -> None:
    start = {**record("start", 16), "attempt": 2}
    lost = record("scalars", 18, **{"held_out/loss": 0.125})
    said = told(run_folder(tmp_path / "run", *attempt(1, range(1, 21), 1.0, NOW), lost, start))
    assert said["held-out"] == "not measured"
    assert "mean of the last 8 lines" in said["loss"]


def test_a_newer_skipped_checkpoint_does_not_count(tmp_path: Path) -> None:
    """A damaged newest checkpoint was skipped, so the run is at an earlier step; no number may be negative."""
    folder = run_folder(tmp_path / "run", *attempt(1, range(1, 21), 1.0, NOW), *attempt(2, range(9, 11), 1.0, NOW + 99))
    publish(folder, 16, NOW + 33)
    said = told(folder)
    assert said["step"].startswith("10 of 40")
    assert "; 0 steps since" in said["checkpoint"]
    publish(folder, 12, NOW + 110)
    assert told(folder)["step"].startswith("12 of 40")


def test_the_closing_line_of_a_run_has_the_losses_of_its_status(tmp_path: Path) -> None:
    """The run was killed after step 8, resumed after step 4 and rewound to step 5; its log has a damaged line."""

    def at(number: int, steps: range) -> list[dict[str, Any]]:
        held_out = {"held_out/loss": 1.0 / number}
        return [{**scalars(step, loss=0.1 * step, **held_out), "attempt": number} for step in steps]

    back = {**record("incident", 7, incident="rewind", details={"to_step": 5}), "attempt": 2}
    start = {**record("start", 4), "attempt": 2}
    records = [*at(1, range(1, 9)), start, *at(2, range(5, 7)), back, *at(2, range(6, 8))]
    folder = run_folder(tmp_path / "run", *records)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "scalars", "step": 9\n')
    said, closing = told(folder), how_it_went(folder / "metrics.jsonl", 7, 40, 1.0)
    assert said["loss"].startswith("0.7000,")
    assert said["held-out"] == "0.5000 at step 7, best 0.5000 at step 5"
    assert "loss 0.7000, best held-out loss 0.5000 at step 5" in closing


def beat(folder: Path, age: float) -> None:
    when = time.time() - age
    words = {"rank": 0, "host": "h", "pid": 1, "step": 20, "phase": "computes", "since": when, "where": "f"}
    (folder / "heartbeats").mkdir(exist_ok=True)
    (folder / "heartbeats" / "rank_0.json").write_text(json.dumps({**words, "time": when}))


def test_a_disk_without_locks_shows_the_newest_heartbeat(half_done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy run is not reported as ended, nor an ended run as healthy."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (half_done / RunLock(half_done).path.name).write_text("{}")
    monkeypatch.setattr("launch.status.fcntl.flock", refuse)
    no_locks = "unknown, because this disk has no locks; newest heartbeat: "
    assert f"{no_locks}none" in told(half_done)["run"]
    beat(half_done, 600)
    assert f"{no_locks}10m00s ago" in told(half_done)["run"]
    write_outcome(half_done, Outcome(0, "completed", 20, 0, None, time.time()))
    assert "ended" in told(half_done)["run"]
    assert "unknown" not in told(half_done)["run"]


def test_values_of_other_types_are_ignored(tmp_path: Path) -> None:
    many = {**record("incident", 3, incident="rewind"), "details": [1]}
    folder = run_folder(tmp_path / "run", scalars(1), scalars(2, loss={}), many, scalars(4, samples_per_s="fast"))
    assert told(folder)["step"] == "4 of 40 (10%), 256 samples, attempt 1"
    assert told(folder)["loss"] == "1.0000, mean of the last 1 lines 1.0000, of the 1 before 1.0000"
    assert main([str(folder), str(folder)]) == 0


def test_nonfinite_numbers_are_shown_and_excluded_from_means(tmp_path: Path) -> None:
    good = [scalars(step, loss=2.0 if step <= 5 else 1.0) for step in range(1, 11)]
    bad = [scalars(11, loss="NaN", grad_norm="NaN"), scalars(12, loss="Infinity", grad_norm="Infinity")]
    said = told(run_folder(tmp_path / "run", *good, *bad))
    last = "mean of the last 5 finite lines 1.0000, of the 5 before 2.0000; not finite in 2 of the last 12 lines"
    assert said["loss"] == f"inf, {last}"
    assert said["grad"].startswith("inf, of the last 12 lines the median 0.55, the largest 1, 2 not finite;")
    nothing = told(run_folder(tmp_path / "nothing", scalars(1, loss="NaN", grad_norm="NaN")))
    assert nothing["loss"] == "nan; not finite in 1 of the last 1 lines"


def test_line_breaks_in_records_are_removed(tmp_path: Path) -> None:
    details = {"error": "first\nsecond\r\n\x1b[2Jthird"}
    folder = run_folder(tmp_path / "run", scalars(1), record("incident", 1, incident="signal\u2028", details=details))
    write_outcome(folder, Outcome(70, "error", 1, 0, "RuntimeError: one\ntwo", NOW))
    found = lines(read_status(folder))
    assert all(line.isprintable() for line in found)
    assert "first second" in found[-1]


def test_values_of_repeated_steps_are_replaced(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", scalars(1), scalars(2, loss="NaN"), {**scalars(2, loss=3.0), "attempt": 2})
    status = read_status(folder)
    assert (status.attempt, status.series["loss"], list(status.times)) == (2, {1: 1.0, 2: 3.0}, [2])


def test_a_folder_of_runs_gives_a_line_for_each(half_done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = half_done.parent
    write_outcome(run_folder(runs / "done", scalars(40, loss=0.5)), Outcome(70, "unexpected", 40, 0, "long", NOW))
    (runs / "no_run").mkdir()
    assert main([str(runs)]) == 0
    done, half = capsys.readouterr().out.splitlines()
    assert done.startswith(f"{runs}/done  step 40 of 40 (100%), 2,560 samples, attempt 1, loss 0.5000, ended ")
    assert done.endswith("unexpected (code 70)")
    assert half.startswith(f"{runs}/half  step 20 of 40 (50%)")


@pytest.mark.parametrize(("name", "problem"), [("", "a folder directly below it is a run"), ("x", "is not a folder")])
def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    assert main([str(tmp_path / name)]) == 2
    assert problem in capsys.readouterr().err
