"""Time a grid of recipes, layouts and variants: one row each, as JSON lines, a table and a plot.

    python -m benchmarks.sweep --factory tiny_dit --layouts ddp distopt fsdp tp2 tp2sp pp2 cp2 --ranks 2 --out sweep

Every cell runs `benchmarks.step` in separate processes. Cells that run out of memory, have an invalid layout or fail
are rows, too. On a device with constants in the planner, a row also has the prediction. The same command continues an
interrupted sweep: it measures cells without a result and those that failed. `--executor NAME` measures the cells as one
nemo-run experiment (launch/README.md); jobs of Slurm continue, and a repeated command leaves out their cells.
"""

import argparse
import hashlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from benchmarks import prediction
from benchmarks.commands import python_command, run_command
from benchmarks.rows import markdown, read_rows
from benchmarks.step import OK, OUT_OF_MEMORY, where
from dit.durable_files import write_atomic
from dit.errors import EXIT_OK, EXIT_UNEXPECTED, ConfigError, one_line_errors
from dit.safe_files import parse_json, read_bytes
from dit.terminal import echo
from launch import environment, experiment, grid

if TYPE_CHECKING:
    from launch.experiment import Executor

MODULE = "benchmarks.step"
ROWS, PAGE, PLOT = "sweep.jsonl", "sweep.md", "sweep.png"
TIMED_OUT, FAILED = "timed out", "failed"
ERROR = re.compile(r"\b(?!ChildFailed)\w*error:", re.IGNORECASE)
"""A line with an error; torchrun adds a ChildFailedError after every failure."""
SIGNAL = re.compile(r"Signal (?!15)\d+ \(\w+\) received")
"""A message of torchrun for a rank that was killed, not stopped by torchrun."""
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_ms_p50": ("ms, p50", lambda x: f"{x:,.1f}"),
    "step_ms_p90": ("ms, p90", lambda x: f"{x:,.1f}"),
    "planned_ms": ("ms, planned", lambda x: f"{x:,.1f}"),
    "valid_tokens_per_s_per_rank": ("tokens/s per rank", lambda x: f"{x:,.0f}"),
    "samples_per_s": ("samples/s", lambda x: f"{x:,.1f}"),
    "tflops_per_rank_model": ("TFLOPS per rank (model)", lambda x: f"{x:.4g}"),
    "tflops_per_rank_hardware": ("TFLOPS per rank (hardware)", lambda x: f"{x:.4g}"),
    "tflops_per_rank_nemo": ("TFLOPS per rank (nemo)", lambda x: f"{x:.4g}"),
    "mfu": ("MFU", lambda x: f"{x:.1%}"),
    "peak_memory_gib": ("GiB", lambda x: f"{x:.2f}"),
    "planned_memory_gib": ("GiB, planned", lambda x: f"{x:.2f}"),
}
"""Columns of the table: heading and format by the field of a row; columns without values are left out."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help=f"folder of {ROWS}, {PAGE}, {PLOT} and of the logs")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a cell (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed optimizer steps (%(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="optimizer steps before timing (%(default)s)")
    parser.add_argument("--shape", metavar="TxHxW", help="synthetic latents, as in benchmarks.step")
    parser.add_argument("--limit", type=float, default=1800, help="time limit of a cell in seconds (%(default)s)")
    parser.add_argument("--executor", help="measure as one nemo-run experiment; it has its own ranks")
    experiment.add_arguments(parser)
    grid.add_arguments(parser)
    return parser


def key_fields(cell: grid.Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that identify the measurement of a row."""
    names = {"recipe": cell.recipe, "layout": cell.layout, "variant": cell.variant, "overrides": cell.overrides}
    return {**names, "ranks": args.ranks, "steps": args.steps, "warmup": args.warmup, "shape": args.shape}


def is_row_of(row: dict[str, Any], cell: grid.Cell, args: argparse.Namespace) -> bool:
    """Return whether a row is the measurement of a cell."""
    return all(row[key] == value for key, value in key_fields(cell, args).items())


def record_file(cell: grid.Cell, args: argparse.Namespace) -> Path:
    """Return the file of a cell's record until it is a row; other steps or overrides have another file."""
    digest = hashlib.sha256(json.dumps(key_fields(cell, args)).encode()).hexdigest()
    return args.out.resolve() / "cells" / f"{cell.name}.{digest[:8]}.jsonl"


def has_record(file: Path) -> bool:
    """Return whether a file has a complete record."""
    return file.exists() and b"\n" in read_bytes(file)


def words_of(cell: grid.Cell, args: argparse.Namespace) -> list[str]:
    """Return the words of `benchmarks.step` for a cell."""
    shape = ["--shape", args.shape] if args.shape else []
    lengths = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    return ["--factory", cell.recipe, *lengths, *shape, "--out", str(record_file(cell, args)), *cell.overrides]


def result_of(file: Path, log: Path, in_time: bool) -> dict[str, Any]:
    """Return the record of a cell, or a record of its failure.

    Args:
        file: of its record.
        log: its output; may be missing.
        in_time: whether it ended within the time limit.
    """
    if has_record(file):
        record: dict[str, Any] = parse_json(read_bytes(file).splitlines()[0])
        return record
    text = read_bytes(log).decode(errors="replace") if log.exists() else ""
    if OUT_OF_MEMORY in text.lower():  # on another rank than rank 0, which writes the record
        return {"status": OUT_OF_MEMORY, **where()}
    # Other ranks report a lost connection after one was killed.
    errors = [line.strip() for kind in (ERROR, SIGNAL) for line in text.splitlines() if kind.search(line)]
    place = log if log.exists() else "the logs of nemo-run"
    status = FAILED if in_time else TIMED_OUT
    return {"status": status, "error": errors[-1] if errors else f"no record; see {place}", **where()}


def line_of(row: dict[str, Any]) -> str:
    """Return a row in a line for the console."""
    keys = [key for key in ("step_ms_p50", "valid_tokens_per_s_per_rank") if row.get(key) is not None]
    values = [f"{COLUMNS[key][0]} {COLUMNS[key][1](row[key])}" for key in keys]
    return "  ".join(filter(None, [*name_of(row), row["status"], *values, row.get("error")]))


def name_of(row: dict[str, Any]) -> list[str]:
    """Return the recipe, the layout and, if there is one, the variant of a row."""
    return list(filter(None, (row["recipe"], row["layout"], row["variant"])))


def settings_of(row: dict[str, Any]) -> list[str]:
    """Return the overrides of a row without those of its layout."""
    layout = grid.layout_overrides(row.get("layout", grid.OWN))
    return [word for word in row.get("overrides", ()) if word not in layout]


def page(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Return the table of the rows, with device, versions and numbers of steps."""
    columns = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    settings = [settings_of(row) for row in rows]
    shared = [word for words in settings[:1] for word in words if all(word in other for other in settings)]
    differing = [" ".join(word for word in words if word not in shared) for words in settings]
    ranks = {row["ranks"] for row in rows}
    optional = [*(["ranks"] if len(ranks) > 1 else []), *(["settings"] if any(differing) else [])]
    heads = ["recipe", "layout", *optional, "status"]
    lines = []
    for row, words in zip(rows, differing, strict=True):
        names = {**row, "settings": words or "-"}
        cells = [COLUMNS[key][1](row[key]) if row.get(key) is not None else "-" for key in columns]
        lines.append([*(str(names[head]) for head in heads), *cells])
    text = markdown([*heads, *(COLUMNS[key][0] for key in columns)], lines, len(columns))
    refused = [f"* {', '.join(name_of(row))}: {row['error']}" for row in rows if row.get("error")]
    places = sorted({f"{device_of(row)}, torch {row['torch']}, revision {row['revision']}" for row in rows})
    counts = sorted({f"{row['steps']} steps after {row['warmup']}" for row in rows})
    about = (
        f"Measured on {'; '.join(places)}. Percentiles of {', '.join(counts)}; rates are the mean work of a step per "
    )
    about += f"median time. All rows have {' '.join(shared)}." if shared else "median time."
    return "\n".join([f"# {title}", "", about, "", text, *(["", *refused] if refused else []), ""])


def device_of(row: dict[str, Any]) -> str:
    """Return the number and name of the devices of a row."""
    return f"{row['ranks']} x {row['device']}"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw tokens/s per rank of every cell; a cell without a time shows its status."""
    from matplotlib.figure import Figure

    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    rates = [row.get("valid_tokens_per_s_per_rank") or 0.0 for row in rows]
    axes.barh(range(len(rows)), rates, color=[f"C{recipes.index(row['recipe'])}" for row in rows])
    for i, (row, rate) in enumerate(zip(rows, rates)):
        text = f"{rate:,.0f}" if rate else row["status"]
        axes.annotate(text, (rate, i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), ["  ".join(name_of(row)) for row in rows], fontsize=8)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set(xlabel="tokens/s per rank", title=", ".join(sorted(set(map(device_of, rows)))))
    figure.savefig(path, dpi=100, metadata={"Software": None})


def measure_here(args: argparse.Namespace, cells: Sequence[grid.Cell]) -> None:
    """Measure cells one by one in processes of this machine, and append a row after each."""
    for cell in cells:
        code = run_command(python_command(MODULE, args.ranks, words_of(cell, args)), log_file(cell, args), args.limit)
        append_row(args, cell, in_time=code is not None)


def measure_there(args: argparse.Namespace, cells: Sequence[grid.Cell], executor: "Executor") -> None:
    """Measure cells as one nemo-run experiment, and append their rows at its end."""
    if not cells:
        return
    tasks = {cell.name: words_of(cell, args) for cell in cells}
    places = {"folder": args.folder, "dryrun": args.dryrun}
    states = experiment.execute(args.name or args.out.name, MODULE, tasks, executor, **places)
    for cell in cells:
        if cell.name in states:
            append_row(args, cell)


def log_file(cell: grid.Cell, args: argparse.Namespace) -> Path:
    """Return the file of a cell's output on this machine."""
    return args.out / "logs" / f"{cell.name}.log"


def scripts_in_queue() -> str:
    """Return nemo-run's scripts of the user's jobs of Slurm that are queued or running; empty without Slurm."""
    if shutil.which("squeue") is None:
        return ""
    queue = subprocess.run(["squeue", "--me", "--noheader", "--format=%o"], capture_output=True, text=True)
    if queue.returncode:
        raise ConfigError(f"squeue failed: {queue.stderr.strip()}; repeat the command on a login node of Slurm")
    scripts = (Path(line) for line in queue.stdout.splitlines() if line.endswith("_sbatch.sh"))
    return "\n".join(read_bytes(path).decode() for path in scripts if path.exists())


def append_row(args: argparse.Namespace, cell: grid.Cell, *, in_time: bool = True) -> None:
    """Write and print a cell's row, of its record and the planner's prediction; delete the record and a former row."""
    file = record_file(cell, args)
    result = result_of(file, log_file(cell, args), in_time)
    row = {**result, **planned(cell, args, result), **key_fields(cell, args)}
    others = [other for other in read_rows(args.out / ROWS) if not is_row_of(other, cell, args)]
    write_atomic(args.out / ROWS, "".join(json.dumps(each_row) + "\n" for each_row in [*others, row]))
    file.unlink(missing_ok=True)
    echo(line_of(row), flush=True)


def planned(cell: grid.Cell, args: argparse.Namespace, result: dict[str, Any]) -> dict[str, Any]:
    """Return the planner's prediction for a measured cell, or its error; empty for an unknown device."""
    device = prediction.device_of(result["device"])
    if device is None or result["status"] != OK:
        return {}
    try:
        return prediction.predicted(words_of(cell, args), args.ranks, device)
    except Exception as error:  # the measurement stays
        return {"plan_error": f"{type(error).__name__}: {error}"}


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code: 0 if every cell has a time, or is out of memory or refused."""
    args = build_parser().parse_intermixed_args(argv)
    if args.ranks < 1 or args.limit <= 0:
        raise ConfigError(f"--ranks={args.ranks} and --limit={args.limit:g} must be above 0")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # stop the processes of a cell, as after Ctrl-C
    of_steps, of_executor = experiment.split_overrides(grid.overrides_of(args))
    cells = grid.cells_of(args, of_steps)
    environment.prepare()
    executor = None if args.executor is None else experiment.executor_of(args.executor, of_executor)
    if executor is not None:
        args.ranks = executor.nnodes() * executor.nproc_per_node()
    finished = [row for row in read_rows(args.out / ROWS) if row["status"] not in (FAILED, TIMED_OUT)]
    missing = [cell for cell in cells if not any(is_row_of(row, cell, args) for row in finished)]
    # An interrupted sweep leaves records without rows: on Slurm, those of all jobs that have ended.
    recorded = [cell for cell in missing if has_record(record_file(cell, args))]
    scripts = scripts_in_queue() if (args.executor or "").startswith("slurm") else ""
    in_queue = [cell for cell in missing if cell not in recorded and str(record_file(cell, args)) in scripts]
    to_measure = [cell for cell in missing if cell not in recorded and cell not in in_queue]
    echo(f"{len(to_measure)} of {len(cells)} cells to measure")
    if in_queue:
        names = ", ".join(cell.name for cell in in_queue)
        echo(f"left out, because their jobs are queued or running; repeat this command after they have ended: {names}")
    for cell in () if args.dryrun else missing:
        if cell in recorded:
            append_row(args, cell)
        elif cell not in in_queue:
            record_file(cell, args).unlink(missing_ok=True)  # incomplete
    if executor is not None:
        measure_there(args, to_measure, executor)
    elif args.dryrun:
        for cell in to_measure:
            echo(shlex.join(python_command(MODULE, args.ranks, words_of(cell, args))))
    else:
        measure_here(args, to_measure)
    if args.dryrun:
        return EXIT_OK
    rows = read_rows(args.out / ROWS)
    write_atomic(args.out / PAGE, page(rows, f"Sweep {args.out.name}"))
    plot(rows, args.out / PLOT)
    echo(f"{args.out / PAGE}, {args.out / PLOT}")
    failed = any(row["status"] in (FAILED, TIMED_OUT) for row in rows)
    return EXIT_UNEXPECTED if failed or in_queue else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
