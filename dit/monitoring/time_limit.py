"""The wall-clock limit of a job: stop early enough to save.

The clock starts with the job, not with the attempt, because a scheduler also counts the time before a restart inside
the job (torchrun's `--max-restarts`):

    SLURM_JOB_START_TIME    if Slurm has set it
    torchrun's own start    under torchrun, whose ranks are its children
    this process's start    otherwise
"""

import os
import time
from pathlib import Path
from typing import Optional

from dit.errors import ConfigError
from dit.monitoring.progress import format_duration
from dit.ranges import duration_s

SLURM_START = "SLURM_JOB_START_TIME"
MARGIN_S = 20.0
"""Time for the processes to end after the last save."""
STEPS = 3
"""Steps that run after a request of the next step: a request takes effect one step later (`dit.training.late`), and the
device may be one step behind the host."""
SAVES = 2.0
"""Time reserved for the last save, in durations of the longest save so far."""


def started_at(process: int) -> float:
    """Return when a process of this machine started, in seconds since the epoch."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def job_start() -> tuple[float, str]:
    """Return when the job of this process started, in seconds since the epoch, and the source of this time."""
    slurm_start = os.environ.get(SLURM_START, "")
    if slurm_start.isdecimal():
        return float(slurm_start), SLURM_START
    process, source = (os.getppid(), "torchrun") if "TORCHELASTIC_RUN_ID" in os.environ else (os.getpid(), "process")
    try:
        return started_at(process), f"start of the {source}"
    except (OSError, ValueError, IndexError):  # not Linux
        return time.time(), "start of the process"


class TimeLimit:
    """Decides when the run must stop to save before the limit.

    Attributes:
        longest_step_s: longest time between two calls of `is_near`, all work of the loop included.
        needed_s: time that the last call of `is_near` reserved for the last steps and the save.

    A change of the wall clock during the run does not move the limit.
    """

    def __init__(self, limit: Optional[str]) -> None:
        self.longest_step_s, self.near, self._limit = 0.0, False, limit
        self._last: Optional[float] = None
        self._end: Optional[float] = None
        if limit is not None:
            start, self._source = job_start()
            self._began = time.monotonic() - time.time() + start
            self._end = self._began + duration_s("training.time_limit", limit)

    def check(self) -> None:
        """Check at the start of a run that the limit is not over; a restart inside a job stops after a step instead.

        Raises:
            ConfigError: it is over, so that every start would train a single step.
        """
        is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if self._end is not None and time.monotonic() >= self._end and not is_restart:
            cure = f"; in a shell of an old job, unset {SLURM_START}" if self._source == SLURM_START else ""
            raise ConfigError(f"{self._description()} is over before the first step; raise the limit{cure}")

    def is_near(self, longest_save_s: float) -> bool:
        """Return whether the run might end too late if it does not stop now; call this once per step."""
        now = time.monotonic()
        if self._last is not None:
            self.longest_step_s = max(self.longest_step_s, now - self._last)
        self._last = now
        self.needed_s = STEPS * self.longest_step_s + SAVES * longest_save_s + MARGIN_S
        self.near = self._end is not None and now + self.needed_s >= self._end
        return self.near

    def reason(self) -> str:
        """Return the reason of a stop without a signal to this rank: the time limit, or a request to another rank."""
        if not self.near:
            return "a request to another rank"
        return f"{self._description()}, before which {self.needed_s:.0f} s are reserved for steps and the save"

    def _description(self) -> str:
        age = format_duration(time.monotonic() - self._began)
        return f"training.time_limit={self._limit} of the job that began {age} ago ({self._source})"
