"""Requests to stop, and a watchdog that writes stacks."""

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from dit.errors import EXIT_PREEMPTED
from dit.monitoring.exit_record import is_peer_lost
from dit.safe_files import make_folder, open_regular

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Requests to stop: schedulers and torchrun send SIGTERM; a dropped ssh session sends SIGHUP, which stays ignored if it
is ignored, as under nohup; Slurm's `--signal=USR1@120` sends SIGUSR1, which torchrun forwards only with
`--signals-to-handle SIGTERM,SIGINT,SIGUSR1`; otherwise that signal kills torchrun."""
SIGNAL_SKEW_S = 3.0  # between the first and the last rank that a scheduler's signal reaches


class PreemptionFlag:
    """Records a request to stop; the run stops at the end of the step, or at once if there is nothing to save.

    The handler only sets a flag, because it may run between any two bytecodes, also inside a collective. All ranks
    decide together whether to stop, from the maximum of their flags. Use as a context manager in the main thread; it
    restores the previous handlers on exit.

    Building a large model, hashing its checkpoint and loading it take longer than schedulers wait, so inside
    `exit_immediately` the handler raises `SystemExit` instead.
    """

    def __init__(self) -> None:
        self.signal_name: Optional[str] = None
        self._at_once = self._raised = False
        self._earlier: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def __enter__(self) -> "PreemptionFlag":
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            # `signal` returns None for a handler that was not installed from Python; it cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._earlier.clear()

    @contextmanager
    def exit_immediately(self) -> Iterator[None]:
        """Exit the process immediately on a request, while there is nothing to save.

        Ranks receive the signal at different times, so a rank that lost a peer waits for its own signal: both count as
        preempted. After `defer_signals` a request is only recorded.

        Raises:
            SystemExit: with code 75, at any point inside.
        """
        self._at_once = True
        try:
            if self.requested:
                raise SystemExit(EXIT_PREEMPTED)
            yield
        except Exception as error:
            peer_lost = is_peer_lost(error)
            # Functions in C, such as torch.asarray, may replace the handler's exception by another one.
            if self._raised or (self.requested and peer_lost):
                raise SystemExit(EXIT_PREEMPTED) from error
            if peer_lost and self._at_once:
                time.sleep(SIGNAL_SKEW_S)  # the handler raises
            raise
        finally:
            self._at_once = False

    def defer_signals(self) -> None:
        """Only record requests from now on; call this before ranks wait for each other."""
        self._at_once = False

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self.signal_name = signal.Signals(number).name
        if self._at_once:
            self._raised = True
            raise SystemExit(EXIT_PREEMPTED)


class StackWatchdog:
    """Writes the stacks of all threads to a file when a step, or the start, takes too long; does not end the run.

    The writing thread does not need the GIL, so this also works inside a hung collective. The stacks show where each
    rank waits; the process-group timeout ends the run.

    Args:
        path: file of this rank, by convention `run_dir/stacks/rank_N.txt`.
        timeout_s: seconds without `beat` until the stacks are written, again after each further `timeout_s`.
    """

    def __init__(self, path: Path | str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        make_folder(Path(path).parent)
        self._descriptor = open_regular(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, follow=False)

    def __enter__(self) -> "StackWatchdog":
        self.beat()
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self._descriptor)

    def beat(self) -> None:
        """Restart the timer; takes some tens of microseconds."""
        faulthandler.dump_traceback_later(self.timeout_s, repeat=True, file=self._descriptor)
