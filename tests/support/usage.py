"""Resources of a process as Linux reports them: memory, threads, open files, children."""

import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from dit.training.pretrain import Run

MIB = 2**20


@dataclass(frozen=True)
class Usage:
    """Resources of a process at one time.

    Attributes:
        memory_mib: private memory (unique set size) after garbage collection.
        threads: names of Python threads.
        num_threads: number of all threads.
        files: targets of the open descriptors.
        children: command lines of child processes.
    """

    memory_mib: float
    threads: list[str]
    num_threads: int
    files: list[str]
    children: list[str]


def usage() -> Usage:
    """Measure this process."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    status = Path("/proc/self/status").read_text().splitlines()
    threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            files.append(_kind(os.readlink(f"/proc/self/fd/{descriptor}")))
    names = sorted(thread.name for thread in threading.enumerate())
    return Usage(private * 1024 / MIB, names, threads, sorted(files), sorted(_children()))


def _kind(target: str) -> str:
    """Return the target of a descriptor, without the number of a socket or pipe."""
    return target.partition("[")[0] if target.startswith(("socket:", "pipe:", "anon_inode:")) else target


def _children() -> Iterator[str]:
    for thread in Path("/proc/self/task").glob("*/children"):
        for child in thread.read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                yield b" ".join(words[:4]).decode(errors="replace")


def settled(quiet_s: float = 2.0, timeout_s: float = 30.0) -> Usage:
    """Return the usage after the numbers of threads, files and children have been constant for a while."""
    deadline, seen, since = time.monotonic() + timeout_s, (-1, -1, -1), 0.0
    while True:
        current = usage()
        numbers = current.num_threads, len(current.files), len(current.children)
        if numbers != seen:
            seen, since = numbers, time.monotonic()
        if time.monotonic() > min(since + quiet_s, deadline):
            return current
        time.sleep(0.2)


@contextlib.contextmanager
def usage_noted(file: Path, every: int) -> Iterator[None]:
    """Append the usage of this process to a file after every `every` steps of a run."""
    original = Run.step

    def noted(self: Run, loss_sums: Tensor, **options: Any) -> float:
        grad_norm = original(self, loss_sums, **options)
        if self.state.step % every == 0:
            with file.open("a") as out:
                out.write(json.dumps({"step": self.state.step, **asdict(usage())}) + "\n")
        return grad_norm

    with mock.patch.object(Run, "step", noted):
        yield


def read_usage(file: Path) -> dict[int, dict[str, Any]]:
    """Return the records of `usage_noted` by step."""
    return {record.pop("step"): record for record in map(json.loads, file.read_text().splitlines())}
