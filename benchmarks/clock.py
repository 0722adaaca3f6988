"""Times of calls in turns on this device, dry runs on fake tensors, and the file of a measurement's rows."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Optional

from benchmarks import rows
from dit.backends.device import describe, device_seconds, use_cuda

WARM_UP = 3
DRY = "dry"
"""Status of a row without measurements."""


def fake_tensors(dry: bool) -> AbstractContextManager[Any]:
    """Create tensors without memory in a dry run, so that cases have their full size on a CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True) if dry else nullcontext()


def medians(calls: Mapping[str, Callable[[], object]], repeats: int, *, dry: bool = False) -> dict[str, float]:
    """Return the median seconds of each call, measured in turns: GPU time, or process time on a CPU.

    A dry run makes each call once and returns zeros.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(1 if dry else WARM_UP + repeats):
        for name, call in calls.items():
            seconds = 0.0
            if use_cuda() and not dry:
                seconds = device_seconds(call)
            else:
                began = time.process_time()
                call()
                seconds = 0.0 if dry else time.process_time() - began
            if dry or number >= WARM_UP:
                times[name].append(seconds)
    return {name: median(values) for name, values in times.items()}


def append(out: Optional[Path], row: Mapping[str, Any]) -> None:
    """Append a row to a file of JSON lines, with the device and the revision of the code."""
    from benchmarks.step import revision

    rows.append(out, {**row, "device": describe(), "revision": revision()})
