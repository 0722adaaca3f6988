"""Commands with random command lines or damaged files, and the check of each outcome.

A command succeeds, or prints one screen that names the cause. A case depends only on a seed and a number:
`failures(fuzz_shards.attempt, SEED, [NUMBER])` repeats it.
"""

import contextlib
import io
import logging
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.bounded import memory_limited

SEED = 14
SCREEN_LINES, SCREEN_CHARACTERS = 24, 24 * 100
HANGS_AFTER_S = 60
"""CPU time, so that other load on the machine does not matter."""
MEMORY_BYTES = 4 * 2**30
"""Memory that a case may allocate."""
SPRUNG = "sprung"


class Hang(BaseException):
    """A case takes too long; commands do not catch it."""


@dataclass
class Ended:
    """Outcome of a case: command line or damages, exit code, output, and violations of the rules."""

    words: Sequence[str]
    code: int = -1
    out: str = ""
    err: str = ""
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def ending_within(seconds: int) -> Iterator[None]:
    """Raise `Hang` in a call that uses more CPU time, or takes three times as long in wall time."""

    def late(signum: int, frame: Any) -> None:
        raise Hang(f"no end after {seconds} s")

    before = [signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 3 * seconds)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before):
            signal.signal(number, handler)


def run(main: Callable[[Sequence[str]], int], words: Sequence[str], folder: Path) -> Ended:
    """Run a command's `main` in an empty folder, with consoles that have Python's usual error handlers."""
    ended, printed = Ended(words), (io.BytesIO(), io.BytesIO())
    handlers = ("strict", "backslashreplace")
    out, err = (io.TextIOWrapper(to, "utf-8", errors, write_through=True) for to, errors in zip(printed, handlers))
    messages = logging.StreamHandler(err)
    logging.getLogger().addHandler(messages)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            contextlib.chdir(folder),
            memory_limited(MEMORY_BYTES),
            ending_within(HANGS_AFTER_S),
        ):
            ended.code = main(list(words))
    except Hang as late:
        ended.wrong.append(str(late))
    except BaseException as error:
        ended.wrong.append(f"{type(error).__name__} escapes: {error}")
    finally:
        logging.getLogger().removeHandler(messages)
    ended.out, ended.err = (stream.getvalue().decode("utf-8") for stream in printed)
    return ended


def judge(ended: Ended, folder: Path, *, codes: Sequence[int], causes: Sequence[str] = ()) -> None:
    """Add to an outcome its violations of the rules.

    Args:
        folder: folder in which executed code would leave a mark.
        codes: documented exit codes of possible failures.
        causes: an error message must contain at least one of these; empty accepts any message.
    """
    wrong = ended.wrong
    if list(folder.rglob(f"{SPRUNG}*")):
        wrong.append("code was run")
    if "Traceback" in ended.err + ended.out:
        wrong.append("a traceback")
    if ended.code == 0 or wrong:
        return
    if ended.code not in codes:
        wrong.append(f"exit code {ended.code}, documented are {[0, *codes]}")
    if ended.err.count("\n") > SCREEN_LINES or len(ended.err) > SCREEN_CHARACTERS:
        wrong.append(f"{len(ended.err)} characters in {ended.err.count(chr(10))} lines are more than a screen")
    if "error: " not in ended.err:
        wrong.append("no line says error")
    if causes and not any(cause in ended.err for cause in causes):
        wrong.append(f"none of {causes} is named")


Attempt = Callable[[int, int, Path], Ended]
"""Makes the case of a seed and a number in an empty folder, and runs it."""


def failures(attempt: Attempt, seed: int, numbers: Sequence[int]) -> list[str]:
    """Run cases and describe those with violations."""
    found = []
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            ended = attempt(seed, number, Path(folder))
        if ended.wrong:
            end = ended.err[-1500:] or ended.out[-300:]
            found.append(f"case {number} of seed {seed}: {ended.words}\n  {'; '.join(ended.wrong)}\n{end}")
    return found
