"""A trace of a few training steps, for chrome://tracing or Perfetto."""

import logging
import os
from pathlib import Path
from typing import Optional, Self

from torch.profiler import profile

from dit.durable_files import create
from dit.safe_files import make_folder

logger = logging.getLogger(__name__)


class StepProfile:
    """Traces some steps of one process, GPU kernels included; a context manager around the loop.

    Args:
        path: trace file to write, gzipped Chrome trace format.
    """

    def __init__(self, path: Path, steps: Optional[list[int]]) -> None:
        self.path = path
        self.first, self.last = steps or (0, 0)
        self._profile = profile() if steps else None
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Start the trace at the first step, or at a later one if the run resumed in between."""
        if self._profile is not None and not self._running and self.first <= step <= self.last:
            self._profile.start()
            self._running = True

    def after(self, step: int) -> None:
        """Write the trace if `step` is the last one."""
        if step == self.last:
            self._stop()

    def _stop(self) -> None:
        if self._profile is None or not self._running:
            return
        self._profile.stop()
        self._running = False
        part = make_folder(self.path.parent) / f"part_{self.path.name}"  # torch compresses files that end with .gz
        os.close(create(part))
        self._profile.export_chrome_trace(str(part))
        part.replace(self.path)
        logger.info("trace of steps %d to %d: %s", self.first, self.last, self.path)
