"""Rank 0's side of `checkpoint.copy_to`: a process of its own copies finished checkpoints beside training.

A copy that fails is logged as an error and an incident, and the next checkpoint is copied with all that is missing. At
the end of the run the newest checkpoint must be there, else the run ends with the code of a failed save.
"""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Optional

import yaml

from dit.checkpoint.helper_process import HelperProcess
from dit.checkpoint.remote import Owner
from dit.errors import CheckpointError
from dit.settings import CheckpointConfig

logger = logging.getLogger(__name__)


class Copies:
    """Copies of one run's checkpoints.

    Args:
        root: folder of the checkpoints.
        config: with `copy_to`, retention and time-out.
        owner: the run.
        report_failure: called with step and error of a copy that failed.

    Attributes:
        error: why the newest copy failed; None if it did not.
        longest_s: duration of the longest copy so far; 0 before the first.
    """

    def __init__(
        self, root: Path, config: CheckpointConfig, owner: Owner, report_failure: Callable[[int, str], None]
    ) -> None:
        self.config, self.report_failure = config, report_failure
        self.error: Optional[str] = None
        self.longest_s = 0.0
        self._wanted: Optional[int] = None
        self._ordered: Optional[int] = None
        self._began = 0.0
        arguments = [str(root), json.dumps(asdict(config)), yaml.safe_dump(asdict(owner))]
        self._process = HelperProcess("dit.checkpoint.copier", arguments, [], "process that copies checkpoints")

    @property
    def is_busy(self) -> bool:
        """Whether a copy is under way."""
        return self._ordered is not None

    def copy(self, step: int) -> None:
        """Order that the checkpoint of `step` is copied, and older ones that are not yet; does not wait."""
        self._wanted = step
        self.poll()

    def poll(self) -> None:
        """Learn how the copy under way is going, and begin the next one; does not wait."""
        if self._ordered is not None:
            self._hear(self._ordered)
        if self._ordered is None and self._wanted is not None:
            self._ordered, self._wanted, self._began = self._wanted, None, time.monotonic()
            if not self._process.is_alive:
                self._process.restart()
            with suppress(CheckpointError):  # `replies` says so
                self._process.order({"step": self._ordered})

    def close(self) -> None:
        """End the process; a copy under way is left unfinished."""
        self._process.close(1.0)

    def _hear(self, step: int) -> None:
        late_s = self.config.save_timeout_s
        try:
            for reply in self._process.replies():
                self._ordered, self.error = None, reply["error"]
                self.longest_s = max(self.longest_s, reply["seconds"])
                if self.error is None:
                    said = "step %d: copied to %s, %.1f MB in %.1f s"
                    logger.info(said, step, self.config.copy_to, reply["bytes"] / 1e6, reply["seconds"])
            if self._ordered is not None and time.monotonic() - self._began > late_s:
                raise CheckpointError(f"it was not finished within checkpoint.save_timeout_s={late_s:g} s")
        except CheckpointError as error:
            self._ordered, self.error = None, str(error)
            self._process.restart()
        if self._ordered is None and self.error is not None:
            logger.error("COPY FAILED of checkpoint of step %d: %s", step, self.error)
            with suppress(CheckpointError):  # of a record on a full disk; the line above is what counts
                self.report_failure(step, self.error)
