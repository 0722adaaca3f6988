"""Scheduling and error handling of saves, between the training loop and `Checkpointer`.

* With `checkpoint.async_save`, a save blocks training only while each rank copies its part into host memory. A separate
  process writes it (`dit.checkpoint.background.writer`) during training.
* Only one save is in progress at a time: the next save waits for it, with a warning. The end of the run and a request
  to stop wait, too.
* A failed save is logged as an error, and training continues. More than `FAILED_SAVES_ALLOWED` failures in a row, or a
  failure of the last save, end the run with a specific exit code.
* With `checkpoint.copy_to`, rank 0 has finished checkpoints copied to another place during training. The run ends when
  its newest checkpoint is copied.
* All ranks decide alike: while a save is in progress, they agree once per step on whether it has failed or is complete.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional, Protocol

import torch.distributed as dist

from dit.backends.process_groups import any_rank, any_rank_each
from dit.checkpoint.background.copies import Copies
from dit.checkpoint.background.remote import Owner
from dit.checkpoint.background.writer import ORPHAN_S, WriterProcess
from dit.checkpoint.checkpointer import Checkpointer, held_out_meta
from dit.checkpoint.sharded_state import local_state
from dit.checkpoint.train_state import TrainState
from dit.errors import CheckpointError, SaveError

logger = logging.getLogger(__name__)

POLL_S = 0.005
"""Time between two polls of a save in progress."""
CLOSE_S = 2 * ORPHAN_S
"""Time that an exiting rank waits for its writer to exit."""
FAILED_SAVES_ALLOWED = 2
"""Consecutive saves that may fail; one more, or a failure of the last save, ends the run."""
ASSUMED_BYTES_PER_S = 100e6
"""Assumed rate of one rank before the first save is timed; that of a slow shared disk."""


@dataclass
class Pending:
    """A save in progress; `held_out` has the entries of the held-out loss in its manifest."""

    step: int
    began: float
    held_out: Mapping[str, Any]
    error: Optional[str] = None
    published: bool = False


class SaveReports(Protocol):
    """Callbacks for saves (on every rank) and copies (on rank 0)."""

    def checkpoint(self, step: int, path: Path, held_out: Mapping[str, Any]) -> None:
        """Report a finished checkpoint, with the entries of the held-out loss in its manifest."""

    def incident(self, name: str, step: int, **details: Any) -> None:
        """Record a failed save or a failed copy to `checkpoint.copy_to`."""


class Saves:
    """Saves of one run; every rank calls every method, at the same steps.

    Args:
        checkpointer: writes synchronous saves, and provides the metadata of all saves.
        on_wait: called repeatedly while waiting for a save or a copy.
        lock: file descriptor of the run's lock, inherited by the writer; -1 for none.

    Attributes:
        failures: failed saves since the last successful one.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        state: TrainState,
        reports: SaveReports,
        on_wait: Callable[[], None] = lambda: None,
        lock: int = -1,
    ) -> None:
        self.checkpointer, self.groups = checkpointer, state.groups
        self.reports, self.on_wait = reports, on_wait
        self.config, self.store = checkpointer.store.config, checkpointer.store
        self.failures = 0
        self.pending: Optional[Pending] = None
        self.writer: Optional[WriterProcess] = None
        self.copies: Optional[Copies] = None
        self._longest_s = _assumed_s(state)
        self._error, self._count = "", 0
        if self.config.async_save:
            name = [uuid.uuid4().hex if self.groups.rank == 0 else ""]
            dist.broadcast_object_list(name)
            self._attempt = name[0]
            self.writer = WriterProcess(self.store.root, self.groups.rank, self.groups.world_size, self.config, lock)
        if self.config.copy_to is not None and self.groups.rank == 0:
            owner = Owner(state.run, checkpointer.config.to_record())
            self.copies = Copies(self.store.root, self.config, owner, partial(reports.incident, "copy_failed"))
            if (newest := self._newest()) is not None:
                self.copies.copy(newest)  # the previous attempt may have ended before copying it

    @property
    def longest_s(self) -> float:
        """Duration of the longest save, including its copy; at least the duration assumed for a first save."""
        return self._longest_s + (0.0 if self.copies is None else self.copies.longest_s)

    def save(self, state: TrainState, metadata: dict[str, Any]) -> None:
        """Save a checkpoint of `state.step`, or start saving it.

        Raises:
            SaveError: too many saves in a row have failed.
        """
        if self.pending is not None and self.groups.rank == 0:
            logger.warning(
                "step %d: waiting for the checkpoint of step %d, which is still being written; saves are due faster "
                "than the disk is: raise checkpoint.interval",
                state.step,
                self.pending.step,
            )
        self.wait()
        began, held_out = time.monotonic(), held_out_meta(state.held_out)
        if self.writer is not None:
            self.pending = Pending(state.step, began, held_out)
            if not self.writer.is_alive:
                self.writer.restart()
            self._count += 1
            try:
                meta, files = self.checkpointer.meta(state), self.checkpointer.files(state, metadata)
                only_first = meta if self.groups.rank == 0 else None
                self.writer.save(state.step, f"{self._attempt}.{self._count}", files, only_first)
            except CheckpointError as error:  # agreed on by `poll`
                self.pending.error = str(error)
            return
        try:
            path = self.checkpointer.save(state, metadata)
        except CheckpointError as error:
            self._failed(state.step, str(error))
        else:
            self._succeeded(state.step, began, path, held_out)

    def poll(self) -> None:
        """Check the save in progress; call this once per step."""
        if self.copies is not None:
            self.copies.poll()
        pending, writer = self.pending, self.writer
        if pending is None or writer is None:
            return
        self._read_replies(pending, writer)
        failed, published = any_rank_each(pending.error is not None, pending.published)
        if not failed and not published:
            return
        self.pending = None
        if pending.error is not None or (failed and not published):
            writer.restart()  # it may still be waiting, or blocked in the kernel
        if published:
            self._succeeded(pending.step, pending.began, self.store.path(pending.step), pending.held_out)
            return
        if self.groups.rank == 0:
            with suppress(CheckpointError):  # otherwise the next save removes the remaining files
                writer.request({"do": "abort", "step": pending.step})
        default_error = f"checkpoint of step {pending.step} was not written: another rank could not; see its error"
        self._failed(pending.step, pending.error or default_error)

    def wait(self) -> None:
        while self.pending is not None:
            self.poll()
            self.on_wait()
            time.sleep(POLL_S)

    def finish(self) -> None:
        """Wait for the save in progress and for the copy of the newest checkpoint; call this before the run ends."""
        self.wait()
        if self.config.copy_to is not None:
            self._finish_copies()
        if self.failures:
            raise SaveError(self._error)

    def _finish_copies(self) -> None:
        copies, newest = self.copies, self._newest()
        if copies is not None and newest is not None:
            copies.copy(newest)
        while any_rank(copies is not None and copies.is_busy):
            if copies is not None:
                copies.poll()
            self.on_wait()
            time.sleep(POLL_S)
        error = None if copies is None else copies.error
        if any_rank(error is not None):
            raise SaveError(
                f"the newest checkpoint is in {self.store.root}, but not in checkpoint.copy_to={self.config.copy_to}: "
                f"{error or 'see the error of rank 0'}"
            )

    def attach_held_out(self, state: TrainState) -> None:
        """Add the newest held-out loss to the checkpoint of `state.step`, which was saved before it was measured.

        Does nothing if there is no such checkpoint, or if its save has failed. A failure is logged; the checkpoint is
        intact.
        """
        if self.groups.rank > 0 or (self.pending is not None and self.pending.error is not None):
            return
        meta = held_out_meta(state.held_out)
        try:
            if self.writer is None:
                self.store.attach(state.step, meta)
            else:
                self.writer.request({"do": "attach", "step": state.step, "meta": meta})
        except CheckpointError as error:
            logger.error("step %d: the held-out loss is not in the checkpoint: %s", state.step, error)

    def close(self) -> None:
        """Let the writer finish and exit; also safe after an error on only this rank."""
        if self.writer is not None:
            self.writer.close(CLOSE_S)
            self.writer, self.pending = None, None
        if self.copies is not None:
            self.copies.close()
            self.copies = None

    def _newest(self) -> Optional[int]:
        return max(self.store.steps(), default=None)

    def _read_replies(self, pending: Pending, writer: WriterProcess) -> None:
        try:
            for reply in writer.replies():
                if reply["do"] == "save" and reply["step"] == pending.step:
                    pending.error = pending.error or reply["error"]
                    pending.published = reply["error"] is None and self.groups.rank == 0
                elif reply["error"] is not None:
                    logger.error("%s of the checkpoint of step %d: %s", reply["do"], reply["step"], reply["error"])
        except CheckpointError as error:
            pending.error = pending.error or str(error)
        if time.monotonic() - pending.began > self.config.save_timeout_s and not pending.published:
            pending.error = pending.error or (
                f"checkpoint of step {pending.step} was not written {self.config.save_limit}; "
                "earlier checkpoints are intact"
            )

    def _succeeded(self, step: int, began: float, path: Path, held_out: Mapping[str, Any]) -> None:
        self.failures = 0
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        self.reports.checkpoint(step, path, held_out)
        if self.copies is not None:
            self.copies.copy(step)

    def _failed(self, step: int, error: str) -> None:
        self.failures += 1
        self._error = error
        with suppress(CheckpointError):  # the record may fail on the same disk; the error is logged below
            self.reports.incident("save_failed", step, error=error, in_a_row=self.failures)
        if self.failures > FAILED_SAVES_ALLOWED:
            raise SaveError(f"{error.removesuffix('.')}. This is failure {self.failures} in a row.")
        most = FAILED_SAVES_ALLOWED + 1
        logger.error("SAVE FAILED (%d in a row, the run ends after %d): %s", self.failures, most, error)


def _assumed_s(state: TrainState) -> float:
    """Return the assumed duration of a save before the first is timed, so that a time limit leaves room for it."""
    values = local_state(state.shards, state.ema, state.groups).values
    return sum(value.numel() * value.element_size() for value in values) / ASSUMED_BYTES_PER_S
