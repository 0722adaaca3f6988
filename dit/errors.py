"""Errors that users can cause, and their exit codes.

Megatron-Core's rerun state machine also uses code 17, for results that do not repeat. Code 16 stays unused, because
that state machine exits with it to compute a step again on another machine.
"""

import errno
import functools
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec

from dit.terminal import echo, log_to_stderr, printable

Arguments = ParamSpec("Arguments")

LONGEST_MESSAGE = 2000
LONGEST_WORD = 400  # characters; most paths are shorter
EXIT_OK = 0
EXIT_TRACEBACK = 1  # as Python exits after an exception
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_NOT_FINITE = 4
EXIT_CHECKPOINT = 5
EXIT_SAVE = 6
EXIT_MACHINE = 17
EXIT_UNEXPECTED = 70
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
EXIT_REASONS = {
    EXIT_OK: "completed",
    EXIT_CONFIG: "config",
    EXIT_DATA: "data",
    EXIT_NOT_FINITE: "not_finite",
    EXIT_CHECKPOINT: "checkpoint",
    EXIT_SAVE: "save",
    EXIT_MACHINE: "machine",
    EXIT_UNEXPECTED: "unexpected",
    EXIT_PREEMPTED: "preempted",
    EXIT_INTERRUPTED: "interrupted",
}
"""Names of the codes in `exit.json`."""
DISK_ERRORS = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space",
    errno.EROFS: "choose another folder",
    errno.EACCES: "change the permissions, or choose another folder",
    errno.EPERM: "change the permissions, or choose another folder",
}
"""File errors that users can cause, and their cures."""


class UserError(ValueError):
    """Base class of errors with a known cause and cure."""

    exit_code = EXIT_UNEXPECTED


class ConfigError(UserError):
    """A setting is impossible, or two settings contradict each other."""

    exit_code = EXIT_CONFIG


class DataError(UserError):
    """Data is missing, unreadable, refused, or damaged beyond the budget."""

    exit_code = EXIT_DATA


class BatchError(DataError):
    """A batch violates the contract between data and training."""


class NotFiniteError(UserError):
    """The loss or the gradient norm is not finite, or spikes, and the settings do not let the run continue."""

    exit_code = EXIT_NOT_FINITE


class CheckpointError(UserError):
    """A required checkpoint is missing or invalid, or a checkpoint cannot be written."""

    exit_code = EXIT_CHECKPOINT


class MachineError(UserError):
    """Computing a step again from the same data and weights gave different numbers."""

    exit_code = EXIT_MACHINE


class DeviceMemoryError(UserError):
    """A GPU has too little memory for the run."""


class BusyError(UserError):
    """The run folder is in use by processes that will stop; a later start can use it."""


class SaveError(CheckpointError):
    """Training ends because its checkpoints cannot be written; earlier checkpoints are intact."""

    exit_code = EXIT_SAVE


def page_of(package: str) -> str:
    """Return the path of the README.md of one of this project's packages, for messages.

    Installed packages include the page. The path is relative if it is below the current folder.
    """
    page, folder = Path(__file__).resolve().parents[1] / package / "README.md", Path.cwd()
    return str(page.relative_to(folder) if page.is_relative_to(folder) else page)


def exit_code(error: BaseException) -> int:
    """Return the process exit code of `error`.

    `SystemExit` keeps its code, Ctrl-C is 130; an error that is not a `UserError` is unexpected (70).
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, UserError) else EXIT_UNEXPECTED


def on_a_screen(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """Shorten a message that would fill a screen: first long words (such as huge numbers), then the middle.

    Characters that a terminal would execute are replaced, see `printable`.
    """

    def shortened(word: re.Match[str]) -> str:
        return f"{word[0][: LONGEST_WORD // 2]}...({len(word[0]):,} characters)"

    short = re.sub(rf"\S{{{LONGEST_WORD},}}", shortened, printable(message))
    if len(short) <= longest:
        return short
    half = longest // 2  # the end has the cure
    return f"{short[:half]} ...({len(short) - 2 * half:,} characters)... {short[-half:]}"


def first_few(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first names of a list for a message, and the number of the others."""
    remainder = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + remainder


def message_of(error: UserError) -> str:
    """Return the message of an error without the path of the configuration, which fiddle appends."""
    return str(error).partition("\n\nFiddle context:")[0]


def one_line_errors(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Decorate a command to print errors that users can cause as one line, and return the exit code.

    These are `UserError`, `DISK_ERRORS` and Ctrl-C. Other errors are printed with their traceback, without control
    characters. If the reader of the output exits (`| head`), nothing is printed. Log warnings go to stderr.
    """

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        log_to_stderr()
        try:
            with flushed_output():
                return command(*args, **kwargs)
        except UserError as error:
            echo(line := on_a_screen(f"error: {message_of(error)}"), file=sys.stderr)
            name_root_cause(line)
            return exit_code(error)
        except BrokenPipeError:
            return discard_output()
        except KeyboardInterrupt as error:
            echo("interrupted", file=sys.stderr)
            return exit_code(error)
        except Exception:
            echo(traceback.format_exc(), end="", file=sys.stderr)
            return EXIT_TRACEBACK

    return run


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush stdout at the end of the block, so that its errors are raised there and not when Python exits.

    Raises:
        BrokenPipeError: the reader of the output exited.
        ConfigError: one of `DISK_ERRORS`, of stdout or of another file.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        if error.filename is None:  # of stdout, whose buffer would be written again when Python exits
            with suppress(OSError):  # of a test, whose stdout is no file
                discard_output()
        file = "" if error.filename is None else f"{error.filename}: "
        raise ConfigError(f"{file}{error.strerror}; {DISK_ERRORS[error.errno]}") from error


def discard_output() -> int:
    """Discard remaining output after `BrokenPipeError`, and return the exit code."""
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


def name_root_cause(line: str, *, failed: bool = True) -> None:
    """Write a line to torchrun's error report of this rank; does nothing without torchrun.

    The file format is that of `torch.distributed.elastic.multiprocessing.errors.record`. That function would write a
    traceback, and importing torch would delay the command line.

    Args:
        failed: whether this rank failed by itself; False if another rank's failure stopped it.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    # torchrun reports the earliest second as the root cause, so ranks stopped by another failure must be later.
    cause = {"message": printable(line), "extraInfo": {"timestamp": str(int(time.time()) - failed)}}
    with suppress(OSError):  # the line was already printed to stderr
        Path(file).write_text(json.dumps({"message": cause}), encoding="utf-8")
