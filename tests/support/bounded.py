"""Run an action with bounded time and memory."""

import contextlib
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS = 60.0  # the actions take a second or two; without the bounds that they test, minutes or forever
MEMORY_BYTES = 1 << 30


@contextlib.contextmanager
def memory_limited(more_bytes: int) -> Iterator[None]:
    """Let allocations fail if they would make this process larger by `more_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def bounded(action: Callable[[], Any], *, memory_bytes: int = MEMORY_BYTES) -> Any:
    """Run `action` in a fork of this process; return its result or raise its exception.

    Args:
        memory_bytes: memory that it may allocate.

    Raises:
        TimeoutError: it takes longer than `SECONDS`.
        MemoryError: it needs more memory.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(action, memory_bytes, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            raise TimeoutError(f"it takes longer than {SECONDS} s")
        result, error = receiver.recv()
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise error
    return result


def _run(action: Callable[[], Any], memory_bytes: int, sender: Connection) -> None:
    try:
        with memory_limited(memory_bytes):
            reply = action(), None
    except BaseException as error:
        reply = None, error
    sender.send(reply)
