"""Signals of child processes that the training process ends itself."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

RUN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that a scheduler or a terminal sends to all processes of a run."""


@contextmanager
def run_signals_blocked() -> Iterator[None]:
    """Block `RUN_SIGNALS` in this thread; processes that it starts inherit this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
