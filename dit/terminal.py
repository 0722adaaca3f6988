"""Terminal output without control characters, which names, errors and records from untrusted sources may contain."""

import logging
import multiprocessing
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Optional, TextIO

ALLOWED_CONTROLS = "\n\t"
"""Control characters that are printed unchanged."""
CLEAR_LINE = "\r\x1b[K"


def printable(text: str, allowed: str = ALLOWED_CONTROLS) -> str:
    """Replace characters that a terminal executes or hides, unless `allowed`: whitespace by " ", others by "?"."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in allowed else " " if c.isspace() else "?" for c in text)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 sample", "1,200 samples"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def echo(*values: object, sep: str = " ", end: str = "\n", file: Optional[TextIO] = None, flush: bool = False) -> None:
    """Print values as `print` does, after `printable`."""
    print(printable(sep.join(map(str, values))), end=end, file=file, flush=flush)


def announce(text: str) -> None:
    """Print the next action of a command to stderr, unbuffered; only the main process of rank 0 prints."""
    if os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:
        echo(text, file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints progress to stderr: a line that it rewrites on a terminal, otherwise new lines."""
    if not sys.stderr.isatty():
        yield announce
        return

    def rewrite(text: str) -> None:
        line = printable(text, allowed="")[: shutil.get_terminal_size().columns - 1]
        print(f"{CLEAR_LINE}{line}", end="", file=sys.stderr, flush=True)

    try:
        yield rewrite
    finally:
        print(file=sys.stderr)


def quiet_libraries() -> None:
    """Hide warnings that users cannot act on; call before importing Megatron-Core.

    At import it lists missing accelerators (the first line of a run states those in use), and it calls deprecated
    functions of torch.distributed.
    """
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron|torch\.distributed")


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            echo(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # as in every `logging` handler: a message that cannot be printed must not stop a run
            self.handleError(record)


def log_to_stderr(level: int = logging.WARNING) -> None:
    """Print log messages of at least this level; does nothing if logging is already configured."""
    logging.basicConfig(level=level, format="%(message)s", handlers=[_Stderr()])
