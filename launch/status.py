"""Status of runs from the files in their folders: `python -m launch.status RUN_DIR [RUN_DIR ...]`.

It works at any time, also during a run or after a crash. A folder of runs gives one line per run.
"""

import fcntl
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Optional

from dit.errors import EXIT_OK, ConfigError, one_line_errors
from dit.monitoring.exit_record import EXIT_FILE, read_outcome
from dit.monitoring.heartbeat import read_beats
from dit.monitoring.progress import format_duration
from dit.monitoring.run_lock import LOCK_FILE
from dit.monitoring.sinks import METRICS_FILE, as_number, current_records, read_records
from dit.safe_files import open_regular, parse_json, parse_yaml, read_bytes
from dit.terminal import echo, printable
from launch.argument_types import command_parser

HELD_OUT = "held_out/loss"
RECENT = 50  # number of log lines in means and medians of current values
RATES = ("samples_per_s", "mfu", "data_wait_share", "loader_samples_per_s", "rank_s_median", "rank_s_slowest",
         "slowest_rank")  # fmt: skip
"""Scalars that depend on machines and layout, which may change between attempts."""
SLOW = 1.2  # ratio to the median above which the slowest rank is named


@dataclass
class RunStatus:
    """Status of a run.

    Attributes:
        num_steps: planned optimizer steps; None if unknown.
        series: values by step for each scalar, including values that are not finite, without discarded steps (see
            `current_records`).
        times: when each logged step of the newest attempt was reported, seconds since the epoch, by step.
        running: whether a process has the lock of the folder; None if unknown.
        beat: time of the newest heartbeat; None if there is none.
        checkpoints: publication time of each published step.
    """

    run_dir: Path
    num_steps: Optional[int] = None
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    attempt: int = 1
    incidents: list[dict[str, Any]] = field(default_factory=list)
    running: Optional[bool] = None
    holder: str = ""
    beat: Optional[float] = None
    checkpoints: dict[int, float] = field(default_factory=dict)
    now: float = field(default_factory=time.time)

    @property
    def step(self) -> int:
        """The newest logged or saved step of this attempt; before the first one, that of the newest checkpoint."""
        began = min(self.times.values(), default=0.0)
        saved = [step for step, published in self.checkpoints.items() if published >= began]
        return max([*self.times, *saved], default=0)

    @property
    def seconds_per_step(self) -> Optional[float]:
        """Seconds per step over the newest log lines of this attempt, including the time between steps."""
        intervals = [(self.times[b] - self.times[a], b - a) for a, b in pairwise(sorted(self.times)[-RECENT:])]
        intervals = [(seconds, steps) for seconds, steps in intervals if seconds >= 0]  # the clock may be set back
        return sum(seconds for seconds, _ in intervals) / sum(steps for _, steps in intervals) if intervals else None

    def recent(self, name: str) -> list[float]:
        """Return the finite values among the newest values of a scalar, oldest first."""
        values = self.series.get(name, {})
        return [values[step] for step in sorted(values)[-RECENT:] if math.isfinite(values[step])]


def is_run(folder: Path) -> bool:
    """Return whether a folder has a file of a run."""
    return any((folder / name).is_file() for name in (METRICS_FILE, EXIT_FILE, LOCK_FILE))


def read_status(run_dir: Path) -> RunStatus:
    """Read a run folder."""
    metrics = run_dir / METRICS_FILE
    status = RunStatus(run_dir)
    with suppress(OSError, ValueError, TypeError, KeyError):
        num_steps = parse_yaml(read_bytes(run_dir / "config.yaml"))["training"]["num_steps"]
        status.num_steps = num_steps if isinstance(num_steps, int) else None
    for record in current_records(read_records(metrics) if metrics.is_file() else ()):
        _add(status, record)
    status.running, status.holder = _lock(run_dir)
    beats = [as_number(beat.time) for beat in read_beats(run_dir).values()]
    status.beat = max((time for time in beats if time is not None and math.isfinite(time)), default=None)
    for folder in (run_dir / "checkpoints").glob("iter_*"):
        if folder.name[5:].isdigit():
            with suppress(OSError):
                status.checkpoints[int(folder.name[5:])] = (folder / "manifest.json").stat().st_mtime
    return status


def _add(status: RunStatus, record: Mapping[str, Any]) -> None:
    """Add a record of `read_records`; values of wrong types are ignored."""
    attempt, step = record["attempt"], record["step"]
    if attempt > status.attempt:
        status.attempt = attempt
        status.times.clear()
        for name in RATES:
            status.series.pop(name, None)
    if record["kind"] == "incident":
        status.incidents.append(dict(record))
        if record.get("incident") == "rewind":
            status.times.clear()
    elif record["kind"] == "scalars":
        if "samples_per_s" in record:
            status.times[step] = record["time"]
        for name, value in record.items():
            if name not in ("kind", "step", "time", "attempt", "loss_hex") and (number := as_number(value)) is not None:
                status.series.setdefault(name, {})[step] = number


def _lock(run_dir: Path) -> tuple[Optional[bool], str]:
    """Return whether a process has the lock of a run folder (None: the disk has no locks), and which."""
    try:
        descriptor = open_regular(run_dir / LOCK_FILE)
    except FileNotFoundError:
        return False, ""
    except OSError:
        return None, ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False, ""
    except BlockingIOError:
        with suppress(OSError, ValueError):
            who = parse_json(os.pread(descriptor, 4096, 0))
            return True, f"process {who['pid']} on {who['host']}" + (f", job {who['job']}" if who.get("job") else "")
        return True, ""
    except OSError:
        return None, ""
    finally:
        os.close(descriptor)


def lines(status: RunStatus) -> list[str]:
    """Describe a run in eleven lines."""
    text_lines = [
        f"{status.run_dir}: {_state(status)}",
        f"step        {_progress(status)}",
        f"rate        {_rate(status)}",
        f"memory      {_memory(status)}",
        f"loss        {_loss(status)}",
        f"held-out    {_held_out(status)}",
        f"grad norm   {_grad_norm(status)}",
        f"data        {_data(status)}",
        f"ranks       {_ranks(status)}",
        f"checkpoint  {_checkpoint(status)}",
        f"incidents   {_incidents(status)}",
    ]
    return [printable(line, allowed="") for line in text_lines]


def overview(folder: Path) -> list[str]:
    """Describe the runs directly below a folder, each in one line."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give training.run_dir of a run")
    runs = sorted(path for path in folder.iterdir() if is_run(path))
    if not runs:
        raise ConfigError(
            f"neither {folder} nor a folder directly below it is a run: none has {METRICS_FILE}, {EXIT_FILE} or "
            f"{LOCK_FILE}; give training.run_dir, or the folder above it"
        )
    width = max(len(str(run_dir)) for run_dir in runs)
    rows = []
    for status in map(read_status, runs):
        loss = status.series.get("loss", {})
        state = _state(status, with_error=False)
        parts = [f"step {_progress(status)}", *([f"loss {loss[max(loss)]:.4f}"] if loss else []), state]
        rows.append(printable(f"{status.run_dir!s:<{width}}  {', '.join(parts)}", allowed=""))
    return rows


def _state(status: RunStatus, *, with_error: bool = True) -> str:
    outcome = read_outcome(status.run_dir)
    if status.running is None and (outcome is None or (status.beat or 0.0) > outcome.time):
        beat = "none" if status.beat is None else f"{format_duration(status.now - status.beat)} ago"
        return f"unknown, because this disk has no locks; newest heartbeat: {beat}"
    if status.running:
        silent = f", last line {format_duration(status.now - max(status.times.values()))} ago" if status.times else ""
        return f"running ({status.holder}){silent}"
    if outcome is not None:
        ended = f"ended {format_duration(status.now - outcome.time)} ago: {outcome.reason} (code {outcome.code})"
        return ended + (f": {outcome.error}" if outcome.error and with_error else "")
    return "ended without a record: it was killed, or its machine failed; the same command continues the run"


def _progress(status: RunStatus) -> str:
    total = f" of {status.num_steps} ({status.step / status.num_steps:.0%})" if status.num_steps else ""
    samples = status.series.get("consumed_samples", {}).get(status.step)
    return f"{status.step}{total}" + (f", {samples:,.0f} samples" if samples else "") + f", attempt {status.attempt}"


def _rate(status: RunStatus) -> str:
    seconds = status.seconds_per_step
    rates, mfu = status.recent("samples_per_s"), status.recent("mfu")
    parts = [] if seconds is None else [f"{seconds:.3g} s per step"]
    parts += [f"{median(rates):,.1f} samples/s"] if rates else []
    parts += [f"MFU {median(mfu):.1%}"] if mfu else []
    if seconds is not None and status.running is not False and status.num_steps and status.step < status.num_steps:
        parts.append(f"ETA {format_duration(seconds * (status.num_steps - status.step))}")
    return ", ".join(parts) or "unknown yet"


def _memory(status: RunStatus) -> str:
    peaks = {kind: status.recent(f"peak_memory_{kind}_bytes") for kind in ("allocated", "reserved", "resident")}
    sizes = [f"{values[-1] / 2**30:.1f} GiB {kind}" for kind, values in peaks.items() if values]
    return f"peak of the fullest rank: {', '.join(sizes)}" if sizes else "unknown yet"


def _loss(status: RunStatus) -> str:
    values = status.series.get("loss", {})
    steps = sorted(values)
    if not steps:
        return "none yet"
    finite = [step for step in steps if math.isfinite(values[step])]
    num_bad = sum(not math.isfinite(values[step]) for step in steps[-RECENT:])
    note = f"; not finite in {num_bad} of the last {len(steps[-RECENT:])} lines" if num_bad else ""
    text, span = f"{values[steps[-1]]:.4f}", max(1, min(RECENT, len(finite) // 2))
    for name, part in (
        (f"mean of the last {{}} {'finite ' * bool(num_bad)}lines", finite[-span:]),
        ("of the {} before", finite[-2 * span : -span]),
    ):
        if part:
            text += f", {name.format(len(part))} {mean([values[step] for step in part]):.4f}"
    return text + note


def _held_out(status: RunStatus) -> str:
    values = {step: value for step, value in status.series.get(HELD_OUT, {}).items() if math.isfinite(value)}
    if not values:
        return "not measured"
    newest, best = max(values), min(values, key=lambda step: values[step])
    return f"{values[newest]:.4f} at step {newest}, best {values[best]:.4f} at step {best}"


def _grad_norm(status: RunStatus) -> str:
    values, finite = status.series.get("grad_norm", {}), status.recent("grad_norm")
    if not values:
        return "none yet"
    newest, count = values[max(values)], min(len(values), RECENT)
    text = f"the median {median(finite):.3g}, the largest {max(finite):.3g}" if finite else "none is finite"
    note = f", {count - len(finite)} not finite" if 0 < len(finite) < count else ""
    return f"{newest:.3g}, of the last {count} lines {text}{note}{_largest_part(status)}"


def _largest_part(status: RunStatus) -> str:
    """Return the part of the model with the largest gradient norm in the newest line that has these norms."""
    parts = {name[10:]: values for name, values in status.series.items() if name.startswith("grad_norm/")}
    newest = max((max(values) for values in parts.values()), default=0)
    norms = {part: values[newest] for part, values in parts.items() if math.isfinite(values.get(newest, math.nan))}
    if not norms:
        return ""
    part = max(norms, key=lambda name: norms[name])
    return f"; most of it in {part} ({norms[part]:.3g})"


def _data(status: RunStatus) -> str:
    waits = status.recent("data_wait_share")
    if not waits:
        return "unknown yet"
    (dropped,) = status.recent("dropped_samples")[-1:] or [0.0]
    rates = status.recent("loader_samples_per_s")
    rate = f"{median(rates):,.0f} samples/s" if rates else "an unknown number"
    return f"waits {mean(waits):.1%} of the time, the loaders make {rate}, {dropped:,.0f} samples dropped"


def _ranks(status: RunStatus) -> str:
    middle, slowest = status.recent("rank_s_median"), status.recent("rank_s_slowest")
    ranks = Counter(status.recent("slowest_rank")).most_common(1)
    if not slowest or not ranks or not any(middle):
        return "unknown yet"
    ratio, which = mean(slowest) / mean(middle), ranks[0][0]
    rank = f" (most often rank {which:.0f})" if ratio >= SLOW else ""
    return f"compute {mean(middle):.3g} s of a step, the slowest {ratio:.2f} times the median{rank}"


def _checkpoint(status: RunStatus) -> str:
    if not status.checkpoints:
        return "none yet"
    newest = max(status.checkpoints)
    age = format_duration(status.now - status.checkpoints[newest])
    return f"step {newest}, {age} old; {max(0, status.step - newest)} steps since, {len(status.checkpoints)} kept"


def _incidents(status: RunStatus) -> str:
    if not status.incidents:
        return "none"
    counts = Counter(str(record.get("incident")) for record in status.incidents)
    newest = status.incidents[-1]
    details = newest.get("details")
    entries = details.items() if isinstance(details, dict) else ()
    parts = "; ".join(f"{key}: {value}" for key, value in entries if isinstance(value, (str, int, float)))
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{text}; the newest: step {newest.get('step')} {newest.get('incident')}" + (f" ({parts})" if parts else "")


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = command_parser("launch.status", "Describe runs from the files in their folders.")
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="training.run_dir of a run; a folder of runs prints one line per run",
    )
    args = parser.parse_args(argv)
    blocks = [lines(read_status(folder)) if is_run(folder) else overview(folder) for folder in args.runs]
    echo("\n\n".join(map("\n".join, blocks)))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
