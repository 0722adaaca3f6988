"""Progress of a run on the console."""

import time
from collections.abc import Callable, Mapping
from typing import Optional, TextIO

from dit.terminal import echo

SMOOTHING = 0.3  # weight of the newest interval in the moving average of seconds per step

# name in the scalars -> (label, format)
COLUMNS: dict[str, tuple[str, str]] = {
    "loss": ("loss", "{:.4f}"),
    "grad_norm": ("grad norm", "{:.3g}"),
    "loss_scale": ("loss scale", "{:g}"),
    "overflowed_steps": ("overflowed", "{:d}"),
    "learning_rate": ("lr", "{:.3g}"),
    "samples_per_s": ("samples/s", "{:,.1f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "tflops_per_rank": ("TFLOPS/rank", "{:.4g}"),
}

WAITS = 0.05  # smallest share of the time spent on waiting for data that a line reports


def format_duration(seconds: float) -> str:
    """Format a duration as `42s`, `3m05s`, `2h07m` or `4d03h`."""
    total = round(max(0.0, seconds))
    for unit, size, smaller, small in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if total >= size:
            return f"{total // size}{unit}{total % size // small:02d}{smaller}"
    return f"{total}s"


def format_progress(step: int, num_steps: int, values: Mapping[str, float], remaining_s: Optional[float]) -> str:
    """Format one line about a step; quantities missing in `values` are left out.

    Args:
        values: scalars by name, see `COLUMNS`.
    """
    width = len(str(num_steps))
    parts = [f"step {step:>{width}}/{num_steps}"]
    parts += [f"{label} {shape.format(values[name])}" for name, (label, shape) in COLUMNS.items() if name in values]
    if values.get("data_wait_share", 0.0) >= WAITS:
        share, rate = values["data_wait_share"], values["loader_samples_per_s"]
        parts.append(f"waited {share:.0%} for data (the loader makes {rate:,.0f} samples/s)")
    if remaining_s is not None:
        parts.append(f"ETA {format_duration(remaining_s)}")
    return "  ".join(parts)


class ConsoleProgress:
    """Prints the progress of the run on rank 0, one line per call.

    Args:
        stream: where to write; standard output if None.
    """

    def __init__(
        self,
        header: str,
        num_steps: int,
        stream: Optional[TextIO] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_steps = num_steps
        self._clock = clock
        self._stream = stream
        self._seconds_per_step: Optional[float] = None
        self._last: Optional[tuple[int, float]] = None
        self.message(header)

    def start(self, step: int) -> None:
        """Start the clock after `step` steps, so that start-up does not count as training time."""
        self._last = (step, self._clock())

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Print a step; call once per logging interval, with host values."""
        self.message(format_progress(step, self.num_steps, values, self._remaining_s(step)))

    def message(self, text: str) -> None:
        """Print a line, flushed, so that a job's log file can be followed."""
        echo(text, file=self._stream, flush=True)

    def _remaining_s(self, step: int) -> Optional[float]:
        now = self._clock()
        if self._last is not None and step > self._last[0]:
            newest = (now - self._last[1]) / (step - self._last[0])
            smooth = newest if self._seconds_per_step is None else self._seconds_per_step
            self._seconds_per_step = smooth + SMOOTHING * (newest - smooth)
        self._last = (step, now)
        return None if self._seconds_per_step is None else self._seconds_per_step * (self.num_steps - step)
