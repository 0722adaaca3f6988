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

from dit.ranges import duration_s

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


def job_start() -> float:
    """Return when the job of this process started, in seconds since the epoch."""
    slurm_start = os.environ.get("SLURM_JOB_START_TIME", "")
    if slurm_start.isdecimal():
        return float(slurm_start)
    try:
        return started_at(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
    except (OSError, ValueError, IndexError):  # not Linux
        return time.time()


class TimeLimit:
    """Decides when the run must stop to save before the limit.

    Args:
        start: of the job, seconds since the epoch; None to look it up.

    Attributes:
        longest_step_s: longest time between two calls of `is_near`, all work of the loop included.

    A change of the wall clock during the run does not move the limit.
    """

    def __init__(self, limit: Optional[str], start: Optional[float] = None) -> None:
        self.longest_step_s, self.near = 0.0, False
        self._last: Optional[float] = None
        self._end: Optional[float] = None
        if limit is not None:
            began = time.monotonic() - time.time() + (job_start() if start is None else start)
            self._end = began + duration_s("training.time_limit", limit)

    def is_near(self, longest_save_s: float) -> bool:
        """Return whether the run might end too late if it does not stop now; call this once per step."""
        now = time.monotonic()
        if self._last is not None:
            self.longest_step_s = max(self.longest_step_s, now - self._last)
        self._last = now
        self.near = self._end is not None and now + self._needed_s(longest_save_s) >= self._end
        return self.near

    def _needed_s(self, longest_save_s: float) -> float:
        return STEPS * self.longest_step_s + SAVES * longest_save_s + MARGIN_S
