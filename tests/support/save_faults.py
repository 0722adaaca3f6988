"""Faults in single saves of a run, as context managers."""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Optional
from unittest import mock

from dit.checkpoint.saves import Saves
from dit.checkpoint.train_state import TrainState

UNLIMITED = resource.RLIM_INFINITY


@contextlib.contextmanager
def around_saves(
    steps: Collection[int],
    rank: int,
    before: Optional[Callable[[Saves], Any]] = None,
    after: Optional[Callable[[Saves], Any]] = None,
) -> Iterator[None]:
    """Call functions on one rank before or after the saves at some steps."""
    original = Saves.save

    def save(self: Saves, state: TrainState, metadata: dict[str, Any]) -> None:
        struck = state.step in steps and self.groups.rank == rank
        if struck and before is not None:
            waits = self.wait

            def wait() -> None:
                waits()
                before(self)

            with mock.patch.object(self, "wait", wait):
                original(self, state, metadata)
        else:
            original(self, state, metadata)
        if struck and after is not None:
            after(self)

    with mock.patch.object(Saves, "save", save):
        yield


def limit_files(saves: Saves, limit: int) -> None:
    """Limit the files of the writing process to `limit` bytes, as a full disk would."""
    process = os.getpid() if saves.writer is None else saves.writer.process.pid
    resource.prlimit(process, resource.RLIMIT_FSIZE, (limit, UNLIMITED))


def disk_full(steps: Collection[int], rank: int, limit: int = 20_000) -> contextlib.AbstractContextManager[None]:
    """Let the disk of one rank be full in the saves at some steps."""

    def lift(saves: Saves) -> None:
        if saves.writer is None:
            limit_files(saves, UNLIMITED)  # a new writer has no limit

    return around_saves(steps, rank, lambda saves: limit_files(saves, limit), lift)


def writer_killed(steps: Collection[int], rank: int) -> contextlib.AbstractContextManager[None]:
    """Kill the writer process of one rank after it has received its order."""
    return around_saves(steps, rank, after=lambda saves: saves.writer.process.kill())


def writer_stopped(
    steps: Collection[int], rank: int, seconds: Optional[float] = None
) -> contextlib.AbstractContextManager[None]:
    """Stop the writer of one rank, as a hanging disk would, for some seconds or forever."""

    def stop(saves: Saves) -> None:
        process = saves.writer.process
        process.send_signal(signal.SIGSTOP)
        if seconds is not None:
            threading.Timer(seconds, process.send_signal, [signal.SIGCONT]).start()

    return around_saves(steps, rank, before=stop)


def out_of_time(margin_s: float) -> contextlib.AbstractContextManager[Any]:
    """Reserve this many seconds before the time limit for the end of a job."""
    return mock.patch("dit.monitoring.time_limit.MARGIN_S", margin_s)
