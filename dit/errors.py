"""Errors that a user can cause, each with the exit code of its process.

Code 17 is also that of Megatron-Core's rerun state machine for results that do not repeat; 16 is kept free for its runs
that end in order to compute a step again on another machine.
"""

import errno
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec

from dit.terminal import echo, log_to_stderr, printable

Arguments = ParamSpec("Arguments")

LONGEST_MESSAGE = 2000
LONGEST_WORD = 400  # characters; the paths of most disks have fewer
EXIT_OK = 0
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
DISK_ERRORS = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EROFS: "name another folder",
    errno.EACCES: "change the permissions, or name another folder",
    errno.EPERM: "change the permissions, or name another folder",
}
"""Errors of files that a user can cause, and their cures."""


class UserError(ValueError):
    """Base class of errors with a known cause and cure."""

    exit_code = EXIT_UNEXPECTED


class ConfigError(UserError):
    """A setting is impossible, or two settings do not fit together."""

    exit_code = EXIT_CONFIG


class DataError(UserError):
    """Data is missing, unreadable, refused, or damaged beyond the budget."""

    exit_code = EXIT_DATA


class BatchError(DataError):
    """A batch breaks the contract between data and training."""


class NotFiniteError(UserError):
    """The loss or the gradient norm is not finite, or spikes, and the run may not go on."""

    exit_code = EXIT_NOT_FINITE


class CheckpointError(UserError):
    """No valid checkpoint where one is required, or one cannot be written."""

    exit_code = EXIT_CHECKPOINT


class MachineError(UserError):
    """A step that was computed again from the same data and weights has other numbers."""

    exit_code = EXIT_MACHINE


class BusyError(UserError):
    """The run folder is in use by processes that will stop; a later start can use it."""

    exit_code = EXIT_UNEXPECTED


class SaveError(CheckpointError):
    """Training ends because its checkpoints cannot be written; what was saved before is intact."""

    exit_code = EXIT_SAVE


def page_of(package: str) -> str:
    """Return the path of the README.md of one of this project's packages, for messages.

    An installed copy has it too. The path is relative if it is below the current folder.
    """
    page, here = Path(__file__).resolve().parents[1] / package / "README.md", Path.cwd()
    return str(page.relative_to(here) if page.is_relative_to(here) else page)


def exit_code(error: BaseException) -> int:
    """Return the process exit code of `error`.

    `SystemExit` keeps its own code, Ctrl-C is 130; an error that is not a `UserError` is unexpected (70).
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, UserError) else EXIT_UNEXPECTED


def on_a_screen(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """Shorten a message that fills a screen: words such as a value of ten thousand digits, then its middle.

    What a terminal would execute is replaced, see `printable`.
    """

    def shortened(word: re.Match[str]) -> str:
        return f"{word[0][: LONGEST_WORD // 2]}...({len(word[0]):,} characters)"

    short = re.sub(rf"\S{{{LONGEST_WORD},}}", shortened, printable(message))
    if len(short) <= longest:
        return short
    half = longest // 2  # the end has the cure
    return f"{short[:half]} ...({len(short) - 2 * half:,} characters)... {short[-half:]}"


def one_line_errors(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Make a command print an error that a user can cause as one line and return its exit code, instead of raising it.

    These are `UserError`, `DISK_ERRORS` and Ctrl-C. If the reader of the output ends (`| head`), nothing is printed.
    Warnings of the log go to stderr.
    """

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        log_to_stderr()
        try:
            with flushed_output():
                return command(*args, **kwargs)
        except UserError as error:
            return _report(str(error), exit_code(error))
        except BrokenPipeError:
            return discard_output()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            file = "" if error.filename is None else f"{error.filename}: "
            return _report(f"{file}{error.strerror}; {DISK_ERRORS[error.errno]}", EXIT_CONFIG)
        except KeyboardInterrupt as error:
            echo("interrupted", file=sys.stderr)
            return exit_code(error)

    return run


def _report(message: str, code: int) -> int:
    echo(line := on_a_screen(f"error: {message}"), file=sys.stderr)
    name_root_cause(line)
    return code


@contextmanager
def flushed_output() -> Iterator[None]:
    """Raise `BrokenPipeError` at the end of the block, not when Python exits, if the reader of stdout has ended."""
    try:
        yield
    finally:
        sys.stdout.flush()


def discard_output() -> int:
    """Discard what is left to print after `BrokenPipeError`, and return the exit code."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


def name_root_cause(line: str, *, failed: bool = True) -> None:
    """Put this line into torchrun's report of this rank, at its end if it `failed` first; nothing without torchrun.

    Writes the file of `torch.distributed.elastic.multiprocessing.errors.record`. That function would write a traceback,
    and importing it, with torch, would delay the command line.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    # torchrun takes the earliest second as the root cause. Ranks that it stops because of a failure must be later.
    cause = {"message": line, "extraInfo": {"timestamp": str(int(time.time()) - failed)}}
    with suppress(OSError):  # the line was already printed to stderr
        Path(file).write_text(json.dumps({"message": cause}), encoding="utf-8")
