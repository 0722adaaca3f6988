"""`benchmarks.sweep`: the status of each cell, skipped cells, the table and the plot.

Cells are stand-ins that end at once; tests/integration/test_sweep.py measures on two ranks.
"""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import sweep
from dit.errors import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK, EXIT_UNEXPECTED

ENDS = """
import json, pathlib, sys, time
words = sys.argv[1:]
file = pathlib.Path(words[words.index("--out") + 1])
layout = file.stem.split(".")[1]
record = {"device": "CPU", "torch": "2", "revision": "abc"}
def write(**more):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(record | more) + "\\n")
if layout == "ddp":
    write(status="ok", step_ms_p50=20.0, step_ms_p90=25.0, valid_tokens_per_s_per_rank=1234.5, samples_per_s=9.0)
elif layout == "tp2":
    write(status="out of memory")
elif layout == "pp3":
    write(status="refused", error="num_layers=2 cannot be split")
elif layout == "cp2":
    print("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
elif layout == "fsdp":
    print("Traceback"); print("error: the disk is full"); print("torch.distributed.errors.ChildFailedError: ")
else:
    time.sleep(60)
sys.exit(layout != "ddp")
"""
LAYOUTS = ("ddp", "tp2", "pp3", "cp2", "fsdp", "ep2")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the arguments of the cells that were started."""
    found: list[list[str]] = []

    def command(module: str, ranks: int, words: list[str]) -> list[str]:
        found.append(words)
        return [sys.executable, "-c", ENDS, *words]

    monkeypatch.setattr(sweep, "python_command", command)
    return found


def run(out: Path, *words: str) -> int:
    return sweep.main(["--factory", "tiny_dit", "--ranks", "2", "--out", str(out), *words])


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "sweep.jsonl").read_text().splitlines()]


def test_every_cell_has_a_row_for_every_outcome(tmp_path, started, capsys):
    """After a refused layout, out of memory on any rank, a failure and a hang, the sweep continues and reports them."""
    assert run(tmp_path, "--limit", "5", "--layouts", *LAYOUTS) == EXIT_UNEXPECTED
    found = rows(tmp_path)
    ended = ["ok", "out of memory", "refused", "out of memory", "failed", "timed out"]
    assert [(row["layout"], row["status"]) for row in found] == list(zip(LAYOUTS, ended, strict=True))
    assert all({"device", "torch", "revision", "ranks", "overrides"} <= set(row) for row in found)
    assert found[4]["error"] == "error: the disk is full"
    page = (tmp_path / "sweep.md").read_text()
    assert "| tiny_dit | ddp | ok | 20.0 | 25.0 | 1,234 | 9.0 |" in page
    assert "| tiny_dit | pp3 | refused | - | - | - | - |" in page
    assert "* tiny_dit, pp3: num_layers=2 cannot be split" in page
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_sweep_continues_at_the_next_cell(tmp_path, started, capsys):
    """Complete rows are not changed. A row that was cut off, and a cell with other settings, are measured."""
    assert run(tmp_path, "--layouts", "ddp", "tp2") == EXIT_OK
    before = (tmp_path / "sweep.jsonl").read_text()
    (tmp_path / "sweep.jsonl").write_text(before + before[:40])
    assert run(tmp_path, "--layouts", "ddp", "tp2", "pp3") == EXIT_OK
    assert len(started) == 3
    assert (tmp_path / "sweep.jsonl").read_text().startswith(before)
    assert len(rows(tmp_path)) == 3
    assert run(tmp_path, "--layouts", "ddp", "--steps", "7") == EXIT_OK
    assert run(tmp_path, "--layouts", "ddp", "training.recompute=full") == EXIT_OK
    assert [row["steps"] for row in rows(tmp_path)[3:]] == [7, 20]
    assert len(started) == 5
    page = (tmp_path / "sweep.md").read_text()
    assert [line.split(" | ")[:3] for line in page.splitlines() if "ddp" in line][1:] == [
        ["| tiny_dit", "ddp", "-"],
        ["| tiny_dit", "ddp", "training.recompute=full"],
    ]
    assert "0 of 2 cells" in [run(tmp_path, "--layouts", "ddp", "tp2"), capsys.readouterr().out][1]


def test_a_sweep_on_slurm_continues_with_the_records_of_jobs_that_have_ended(tmp_path, monkeypatch):
    """A record of other steps, or an incomplete one, does not count."""
    executed: list[list[str]] = []

    def execute(title: str, module: str, tasks: dict[str, list[str]], executor: Any, **places: Any) -> dict[str, str]:
        executed.append([name.split(".")[1] for name in tasks])
        assert not any(Path(words[words.index("--out") + 1]).exists() for words in tasks.values())
        subprocess.run([sys.executable, "-c", ENDS, *next(iter(tasks.values()))])
        if len(executed) <= 2:
            raise KeyboardInterrupt
        return dict.fromkeys(tasks, "SUCCEEDED")

    executor = SimpleNamespace(nnodes=lambda: 1, nproc_per_node=lambda: 2)
    monkeypatch.setattr(sweep.experiment, "executor_of", lambda *_: executor)
    monkeypatch.setattr(sweep.experiment, "execute", execute)
    monkeypatch.setenv("PATH", str(tmp_path))  # without `squeue`
    words = ["--executor", "slurm", "--layouts", "ddp", "tp2"]
    assert run(tmp_path, *words) == EXIT_INTERRUPTED
    assert run(tmp_path, *words, "--steps", "7") == EXIT_INTERRUPTED
    args = sweep.build_parser().parse_args(["--factory", "tiny_dit", "--ranks", "2", "--out", str(tmp_path)])
    sweep.record_file(sweep.grid.Cell("tiny_dit", "tp2", "", ()), args).write_text('{"status"')
    assert run(tmp_path, *words) == EXIT_OK
    assert executed == [["ddp", "tp2"], ["ddp", "tp2"], ["tp2"]]
    ended = [("ddp", "ok", 20), ("tp2", "out of memory", 20)]
    assert [(row["layout"], row["status"], row["steps"]) for row in rows(tmp_path)] == ended
    assert run(tmp_path, *words) == EXIT_OK
    assert len(executed) == 3


def test_cells_whose_jobs_are_in_the_queue_of_slurm_are_left_out(tmp_path, monkeypatch, capsys):
    """The queue has a job of the cell with these steps, whose record may be incomplete, and other jobs.

    Only the executor for Slurm reads the queue.
    """
    executed: list[list[str]] = []
    executor = SimpleNamespace(nnodes=lambda: 1, nproc_per_node=lambda: 2)
    monkeypatch.setattr(sweep.experiment, "executor_of", lambda *_: executor)
    monkeypatch.setattr(sweep.experiment, "execute", lambda _, __, tasks, *___, **____: executed.append([*tasks]) or {})
    args = sweep.build_parser().parse_args(["--factory", "tiny_dit", "--ranks", "2", "--out", str(tmp_path)])
    cell = next(cell for cell in sweep.grid.cells_of(args, []))
    record = sweep.record_file(cell, args)
    record.parent.mkdir()
    record.write_text('{"status"')
    script, squeue = tmp_path / "job_sbatch.sh", tmp_path / "squeue"
    script.write_text(f"srun python -m benchmarks.step {shlex.join(sweep.words_of(cell, args))}\n")
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "--me --noheader --format=%o" ] || exit 1\necho bash\necho {script}\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words = ["--executor", "slurm"]
    assert run(tmp_path, *words) == EXIT_UNEXPECTED
    assert "0 of 1 cells to measure\nleft out, because their jobs are" in capsys.readouterr().out
    assert record.exists()
    assert run(tmp_path, *words, "--steps", "7") == EXIT_OK
    squeue.write_text("#!/bin/sh\necho slurm is down >&2; exit 1\n")
    assert run(tmp_path, *words) == EXIT_CONFIG
    assert "squeue failed: slurm is down; " in capsys.readouterr().err
    assert run(tmp_path, "--executor", "torchrun") == EXIT_OK
    squeue.write_text("#!/bin/sh\n")
    assert run(tmp_path, *words) == EXIT_OK
    assert executed == [[cell.name]] * 3
    assert not record.exists()


def test_a_failed_cell_is_measured_again_in_place_of_its_row(tmp_path, started):
    for _ in range(2):
        assert run(tmp_path, "--layouts", "ddp", "fsdp") == EXIT_UNEXPECTED
    assert len(started) == 3
    assert [row["status"] for row in rows(tmp_path)] == ["ok", "failed"]


def test_a_killed_rank_is_the_error_of_its_cell(tmp_path):
    killed = "errors.ChildFailedError: \n  traceback : Signal 9 (SIGKILL) received by PID 5\n"
    (tmp_path / "log").write_text(f"{killed}RuntimeError: Connection closed by peer\n")
    row = sweep.result_of(tmp_path / "absent", tmp_path / "log", in_time=True)
    assert (row["status"], row["error"]) == ("failed", "traceback : Signal 9 (SIGKILL) received by PID 5")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stopped_sweep_stops_the_processes_of_its_cell(tmp_path, monkeypatch, name):
    """The stand-in of a cell stops the sweep, then would run for a minute."""
    text = (
        f"import os, signal, time; print(os.getpid(), flush=True); os.kill(os.getppid(), signal.{name}); time.sleep(60)"
    )
    monkeypatch.setattr(sweep, "python_command", lambda _, __, words: [sys.executable, "-c", text])
    previous = signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        assert run(tmp_path, "--layouts", "ddp") == EXIT_INTERRUPTED
    finally:
        signal.signal(getattr(signal, name), previous)
    [log] = (tmp_path / "logs").iterdir()
    assert not psutil.pid_exists(int(log.read_text()))


def test_a_dry_run_prints_the_commands(tmp_path, capsys):
    assert run(tmp_path, "--dryrun", "--layouts", "tp2", "--shape", "1x8x8", "training.precision=bf16") == EXIT_OK
    command = capsys.readouterr().out.splitlines()[1]
    assert "-m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.step --factory tiny_dit" in command
    assert "--shape 1x8x8" in command
    assert "training.precision=bf16 parallel.tensor_model_parallel_size=2" in command
    assert not any(tmp_path.iterdir())


def test_unmeasurable_settings_are_refused(tmp_path, capsys):
    assert run(tmp_path, "--ranks", "0") == EXIT_CONFIG
    assert "--ranks=0 and --limit=1800 must be above 0" in capsys.readouterr().err


def test_planned_times_have_a_column_if_a_row_has_a_plan():
    row = {"recipe": "r", "layout": "own", "variant": "", "status": "ok", "ranks": 1, "steps": 5, "warmup": 1}
    row |= {"device": "CPU", "torch": "2", "revision": "abc", "step_ms_p50": 20.0}
    assert "planned" not in sweep.page([row], "x")
    page = sweep.page([row | {"planned_ms": 18.0}, row], "x")
    assert "| recipe | layout | status | ms, p50 | ms, planned |" in page
    assert "| r | own | ok | 20.0 | 18.0 |" in page
    assert "| r | own | ok | 20.0 | - |" in page
