"""Detection of hangs and of a dead launcher.

A thread of every rank rewrites `run_dir/heartbeats/rank_N.json` every few seconds. The file of a process that is
stopped, dead or cut off from the disk no longer changes. The file of a hung rank still changes, but its step and phase
are earlier than those of the other ranks, which wait for it in a collective. A rank that waited too long writes its
verdict to `exit.json` and exits, so that the launcher terminates the run. The background thread does this because the
main thread is blocked in the collective.

If torchrun dies, nothing can stop or restart its ranks. Each rank then sends itself SIGTERM, saves and stops.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Optional, Self

from dit.durable_files import strict_json, write_atomic
from dit.errors import EXIT_UNEXPECTED
from dit.monitoring.exit_record import Outcome, write_outcome
from dit.monitoring.progress import format_duration
from dit.monitoring.sinks import METRICS_FILE, TAIL_BYTES, newest_attempt
from dit.safe_files import make_folder, open_to_append, read_own

logger = logging.getLogger(__name__)

FOLDER = "heartbeats"
HANG = "hang"
INTERVAL_S = 5.0
STDLIB = Path(os.__file__).parent
COLLECTIVES_S = 10.0  # limit for writing the record of the collectives: torch may block, and the process must end
SILENT_S = 240.0  # after which a rank that waits for a silent one exits, unless `timeout_s` is shorter
# In the order of a step: among ranks that wait for each other, the rank in the earliest phase of the earliest step is
# late.
PHASES = ("starts", "reads data", "computes", "reduces the gradient", "updates", "ends the step", "saves", "validates",
          "samples", "has ended")  # fmt: skip


class Phase:
    """Current phase of the main thread; setting it counts as progress."""

    def __init__(self) -> None:
        self.step: Optional[int] = None
        self.name = PHASES[0]
        self.since = time.time()

    def enter(self, name: str, step: Optional[int] = None) -> None:
        self.name, self.since = name, time.time()
        self.step = self.step if step is None else step

    def go_on(self) -> None:
        self.since = time.time()


@dataclass(frozen=True)
class Beat:
    """State of a rank, as written to its file.

    Attributes:
        where: innermost functions of the main thread, and its current collective.
        machine: identifies the machine on which `pid` is valid, see `machine`.
        is_orphan: whether its launcher died; the rank saves and stops.
    """

    rank: int
    host: str
    pid: int
    step: Optional[int]
    phase: str
    since: float
    time: float
    where: str
    machine: str = ""
    is_orphan: bool = False

    @property
    def progress(self) -> tuple[int, int]:
        """Sort key: step, then phase."""
        return -1 if self.step is None else self.step, PHASES.index(self.phase) if self.phase in PHASES else 0

    def __str__(self) -> str:
        step = "before step 1" if self.step is None else f"after step {self.step}"
        return f"rank {self.rank} ({self.host}, process {self.pid}) {self.phase} {step} ({self.where})"


def read_beats(run_dir: Path | str) -> dict[int, Beat]:
    """Return the newest beat of each rank of a run; unreadable files are skipped."""
    beats = (read_own(path, Beat) for path in Path(run_dir).glob(f"{FOLDER}/rank_*.json"))
    return {beat.rank: beat for beat in beats if beat is not None}


def read_beat(run_dir: Path | str, rank: int) -> Optional[Beat]:
    """Return the newest beat of a rank; None if there is none."""
    return read_own(Path(run_dir) / FOLDER / f"rank_{rank}.json", Beat)


class Heartbeat:
    """Writes this rank's file, and ends the process when it waited too long; a context manager around the run.

    Args:
        timeout_s: seconds in one phase until the process ends; None for no limit.
        end: ends the process with a code; does not return.
    """

    def __init__(
        self,
        run_dir: Path | str,
        rank: int,
        world_size: int,
        timeout_s: Optional[float],
        is_ours: Callable[[], bool] = lambda: True,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.phase = Phase()
        self._run_dir, self._rank, self._world_size = Path(run_dir), rank, world_size
        self._timeout_s, self._is_ours, self._end = timeout_s, is_ours, end
        self._interval_s = INTERVAL_S if timeout_s is None else min(INTERVAL_S, timeout_s / 6)
        self._limit_s = min(SILENT_S, timeout_s or SILENT_S)  # longest wait for a silent rank
        self._silent_s = max(3 * self._interval_s, self._limit_s / 2)  # several beats
        self._first_read: dict[int, tuple[float, float]] = {}  # by rank: newest beat's time, first read of it
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._is_orphan = False
        self._done = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        with suppress(OSError):
            make_folder(self._run_dir / FOLDER)
            for path in self._run_dir.glob(f"{FOLDER}/rank_*.json") if self._rank == 0 else ():
                rank = path.stem.rpartition("_")[2]
                if rank.isdecimal() and int(rank) >= self._world_size:
                    path.unlink()  # left by an attempt on more ranks
        self._write()
        self._thread.start()
        return self

    def __exit__(self, error: Optional[type[BaseException]], *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=10 * self._interval_s)
        if error is None:  # other ranks may still work, such as rank 0, which writes samples after the last step
            self.phase.enter(PHASES[-1])
            self._write()

    def explain(self) -> str:
        """Return a sentence about the rank that the others wait for; call this after a peer was lost."""
        return self._judge()[0]

    def _judge(self) -> tuple[str, list[int], bool]:
        """Read all beats and return the verdict.

        The time in a beat comes from the clock of its machine, which may be wrong. So the silence of a rank is measured
        by the clock of this process, from the first read of its newest beat.
        """
        beats, now = read_beats(self._run_dir), time.monotonic()
        for rank, beat in beats.items():
            if rank not in self._first_read or self._first_read[rank][0] != beat.time:
                self._first_read[rank] = beat.time, now
        unchanged_s = {rank: now - self._first_read[rank][1] for rank in beats}
        return verdict(beats, unchanged_s, self._rank, self._world_size, self._silent_s)

    def _run(self) -> None:
        while not self._sleep():
            self._check_launcher()
            self._write()
            waited = time.time() - self.phase.since
            if waited < self._limit_s - self._silent_s - self._interval_s:
                continue
            text, blamed, silent = self._judge()
            if self._timeout_s is None or waited < self._limit_s:
                continue
            starts = self.phase.name == PHASES[0]  # reading and hashing a large checkpoint may take long
            if silent or (waited >= self._timeout_s and not starts):
                self._give_up(waited, text, blamed)

    def _check_launcher(self) -> None:
        """Send SIGTERM to this process, which then saves and stops, if its launcher has died."""
        if self._launcher in (None, os.getppid()) or self._is_orphan:
            return
        self._is_orphan = True
        logger.error("rank %d: its launcher, process %d, is dead; it saves and stops", self._rank, self._launcher)
        signal.pthread_kill(self._main, signal.SIGTERM)

    def _sleep(self) -> bool:
        """Wait until the next beat; return whether the run is over.

        If the wait took far longer than the interval, this process was stopped or its machine slept. The main thread
        could not run in that time, so it does not count as waiting.
        """
        began = time.time()  # Linux's monotonic clock does not advance while the machine sleeps
        over = self._done.wait(self._interval_s)
        if time.time() - began > 4 * self._interval_s:
            self.phase.go_on()
        return over

    def _give_up(self, waited: float, text: str, blamed: list[int]) -> None:
        phase = self.phase
        where = _where(sys._current_frames().get(self._main))
        waits = f"rank {self._rank} {phase.name} for {format_duration(waited)} after step {phase.step or 0} ({where})"
        error = f"{waits}: {text}"
        logger.error(error)
        if self._is_ours():
            write_outcome(self._run_dir, Outcome(EXIT_UNEXPECTED, HANG, phase.step, self._rank, error))
            if self._rank == min((r for r in range(self._world_size) if r not in blamed), default=self._rank):
                self._write_incident(error, blamed)
            writing = threading.Thread(target=self._write_collectives, daemon=True)
            writing.start()
            writing.join(COLLECTIVES_S)
        self._end(EXIT_UNEXPECTED)

    def _write_collectives(self) -> None:
        """Write torch's record of this rank's newest collectives ("flight recorder") to a file."""
        import torch.distributed as dist
        from torch._C import _distributed_c10d as records

        if dist.is_initialized():
            name = "_dump_nccl_trace_json" if dist.get_backend() == "nccl" else "_dump_fr_trace_json"
            with suppress(AttributeError, OSError, RuntimeError):  # this torch has no flight recorder
                path = self._run_dir / FOLDER / f"collectives_{self._rank}.json"
                write_atomic(path, getattr(records, name)(), flush=False)

    def _write_incident(self, error: str, blamed: list[int]) -> None:
        """Append the incident to `metrics.jsonl`, because the rank that usually writes it may be the one that hangs."""
        details = {"blamed": blamed, "text": error, "beats": [asdict(b) for b in read_beats(self._run_dir).values()]}
        record = {"kind": "incident", "step": self.phase.step, "time": time.time(), "incident": HANG}
        path = self._run_dir / METRICS_FILE
        with suppress(OSError, ValueError), open_to_append(path) as file:
            file.seek(max(0, file.tell() - TAIL_BYTES))
            tail = file.read()
            if tail and not tail.endswith(b"\n"):
                return  # the writing rank was stopped inside a line
            attempt = max(1, newest_attempt(tail))
            file.write(strict_json({**record, "attempt": attempt, "details": details}).encode() + b"\n")

    def _write(self) -> None:
        phase = self.phase
        where = _where(sys._current_frames().get(self._main))
        host, pid, now = socket.gethostname(), os.getpid(), time.time()
        beat = Beat(self._rank, host, pid, phase.step, phase.name, phase.since, now, where, machine(), self._is_orphan)
        path = self._run_dir / FOLDER / f"rank_{self._rank}.json"
        with suppress(OSError):  # a disk that fails ends the run elsewhere, with a better message
            write_atomic(path, strict_json(asdict(beat)), part=path.with_suffix(".part"), flush=False)


def verdict(
    beats: dict[int, Beat], unchanged_s: dict[int, float], rank: int, world_size: int, silent_s: float
) -> tuple[str, list[int], bool]:
    """Return the ranks that block a run.

    Args:
        beats: the newest of each rank, read by `rank`.
        unchanged_s: seconds since the first read of each beat.
        silent_s: a rank without a new beat for longer is silent.

    Returns:
        A sentence about them, the ranks, and whether they are silent.
    """
    silent = {r: f"rank {r} never wrote a heartbeat" for r in range(world_size) if r not in beats}
    own = beats.get(rank)
    for peer, beat in beats.items():
        # A file of an earlier attempt may also have the last phase, but has another step.
        has_ended = beat.phase == PHASES[-1] and own is not None and beat.step == own.step
        if peer == rank or peer >= world_size or has_ended:
            continue
        state = _process_state(beat)
        if state is not None:
            silent[peer] = f"{beat} is {state}"
        elif unchanged_s[peer] >= silent_s:
            silent[peer] = f"{beat} has been silent for {format_duration(unchanged_s[peer])}: stopped, dead or cut off"
    if silent:
        return "; ".join(text for _, text in sorted(silent.items())), sorted(silent), True
    present = [beat for r, beat in beats.items() if r < world_size]
    earliest = min((beat.progress for beat in present), default=(0, 0))
    late = [beat for beat in present if beat.progress == earliest]
    if len(late) == len(present):
        return f"all {world_size} ranks are in the same phase: {late[0] if late else ''}", [], False
    return "the others wait for " + "; ".join(map(str, late)), sorted(beat.rank for beat in late), False


def machine() -> str:
    """Return the boot id of this machine and the process-id namespace of this process; "" without /proc.

    Host names are not unique: containers may have the name of their node, and machines may be copies of one image.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_state(beat: Beat) -> Optional[str]:
    """Return "stopped ..." or "dead" for a process of this machine; None if it runs, or runs on another machine."""
    if (beat.host, beat.machine) != (socket.gethostname(), machine()):
        return None
    try:
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "dead" if Path("/proc/self/stat").exists() else None
    return {"T": "stopped (SIGSTOP or a debugger)", "Z": "dead", "X": "dead"}.get(state)


def _where(frame: Optional[FrameType]) -> str:
    """Return the innermost functions of a thread, and its current collective."""
    names: list[str] = []
    collective = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("distributed_c10d.py"):
            collective = collective if code.co_name == "wrapper" else code.co_name
        elif len(names) < 2 and "/torch/" not in code.co_filename and Path(code.co_filename).parent != STDLIB:
            names.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(names) + (f", in the collective {collective}" if collective else "")
