"""Copies of finished checkpoints to `checkpoint.copy_to` during training, in a process that rank 0 starts.

A failed copy is logged as an error and an incident; the next copy includes everything that is missing. If the newest
checkpoint is not copied at the end of the run, the run exits with the code of a failed save.

The process exits as soon as its training process exits. An interrupted copy has no manifest, and the next attempt of
the run repeats it.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Optional

from dit.checkpoint.background.process import BackgroundProcess, connection_and_settings, serve
from dit.checkpoint.background.remote import Owner, RemoteStore, copy_all
from dit.checkpoint.manifest import Manifest
from dit.checkpoint.store import CheckpointStore
from dit.errors import CheckpointError
from dit.settings import CheckpointConfig

logger = logging.getLogger(__name__)

ATTEMPTS, FIRST_WAIT_S = 3, 2.0
"""A failed copy is retried after a wait that doubles each time."""


class Copies:
    """Copies of one run's checkpoints.

    Attributes:
        report_failure: called with the step of a copy that failed, and `error`.
    """

    def __init__(self, root: Path, config: CheckpointConfig, owner: Owner, report_failure: Callable[..., None]) -> None:
        self.config, self.report_failure = config, report_failure
        self.error: Optional[str] = None
        self.longest_s = self._began = 0.0
        self._requested: Optional[int] = None
        self._ordered: Optional[int] = None
        settings = {"root": str(root), "config": config, "owner": owner}
        self._process = BackgroundProcess(__name__, settings, [], "process that copies checkpoints")

    @property
    def is_busy(self) -> bool:
        return self._ordered is not None

    def copy(self, step: int) -> None:
        """Request a copy of the checkpoint of `step`, and of older ones that are missing; does not wait."""
        self._requested = step
        self.poll()

    def poll(self) -> None:
        """Read the result of the copy in progress, and start the next one; does not wait."""
        if self._ordered is not None:
            self._read_replies(self._ordered)
        if self._ordered is None and self._requested is not None:
            self._ordered, self._requested, self._began = self._requested, None, time.monotonic()
            if not self._process.is_alive:
                self._process.restart()
            with suppress(CheckpointError):  # `replies` raises it, too
                self._process.request({"step": self._ordered})

    def close(self) -> None:
        """Stop the process; a copy in progress is left unfinished."""
        self._process.close(1.0)

    def _read_replies(self, step: int) -> None:
        try:
            for reply in self._process.replies():
                self._ordered, self.error = None, reply["error"]
                self.longest_s = max(self.longest_s, reply["seconds"])
                if self.error is None:
                    message = "step %d: copied to %s, %.1f MB in %.1f s"
                    logger.info(message, step, self.config.copy_to, reply["bytes"] / 1e6, reply["seconds"])
            if self._ordered is not None and time.monotonic() - self._began > self.config.save_timeout_s:
                raise CheckpointError(f"it was not finished {self.config.save_limit}")
        except CheckpointError as error:
            self._ordered, self.error = None, str(error)
            self._process.restart()
        if self._ordered is None and self.error is not None:
            logger.error("COPY FAILED of checkpoint of step %d: %s", step, self.error)
            with suppress(CheckpointError):  # the record may fail on a full disk; the error is logged above
                self.report_failure(step, error=self.error)


def copy(root: str, config: CheckpointConfig, owner: Owner, recent: dict[int, Manifest]) -> int:
    """Copy all complete checkpoints, with retries; return the number of copied bytes.

    `recent`: see `RemoteStore`.
    """
    assert config.copy_to is not None
    for attempt in range(1, ATTEMPTS + 1):
        try:
            remote = RemoteStore(config.copy_to, recent)
            remote.claim(owner)
            return copy_all(CheckpointStore(root, config), remote)
        except CheckpointError:
            if attempt == ATTEMPTS:
                raise
            time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
    raise AssertionError


def execute(
    order: dict[str, Any], root: str, config: CheckpointConfig, owner: Owner, recent: dict[int, Manifest]
) -> dict[str, Any]:
    """Execute a request, and return the reply: step, bytes, seconds, and the error or None."""
    began, size, error = time.monotonic(), 0, None
    try:
        size = copy(root, config, owner, recent)
    except Exception as failure:  # the training process logs it and continues
        error = str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
    return {"step": order["step"], "bytes": size, "error": error, "seconds": time.monotonic() - began}


def end_with(connection: Connection) -> None:
    """Exit when the training process closes its end of the connection."""
    closed = select.poll()
    closed.register(connection, select.POLLRDHUP)
    closed.poll()
    os._exit(0)


def main() -> None:
    """Execute requests until the training process closes the connection or exits."""
    connection, settings = connection_and_settings()
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    serve(connection, partial(execute, recent={}, **settings))


if __name__ == "__main__":
    main()
