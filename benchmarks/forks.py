"""Start ranks by forking one process that has imported everything, which takes a rank a tenth of its start."""

import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.parallel_checkpoints"])  # the tests have a longer list


def free_port() -> int:
    """Find a port below those the system hands out: the ranks bind it seconds later, when such a one may be taken."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port


def _rank(main: Callable[[Path, int], None], folder: Path, rank: int) -> None:
    """Be one rank, in a process of its own, with a log of its own."""
    import torch

    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith(("WANDB", "TORCHELASTIC"))]:
        del os.environ[name]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "DIT_DEVICE": "cpu", "WANDB_MODE": "offline"}
    torch.set_num_threads(1)
    try:
        main(folder, rank)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_ranks(main: Callable[[Path, int], None], count: int, folder: Path, *, timeout_s: float) -> None:
    """Run `main(folder, rank)` in as many processes, each of which writes `rank_N.log` there.

    Raises:
        RuntimeError: a rank failed, or they took too long; the message holds the end of their output.
    """
    ranks = [FORKS.Process(target=_rank, args=(main, folder, rank)) for rank in range(count)]
    for process in ranks:
        process.start()
    deadline, left = time.monotonic() + timeout_s, {process.sentinel for process in ranks}
    while left and time.monotonic() < deadline:
        left -= set(wait(left, timeout=deadline - time.monotonic()))
        if any(process.exitcode for process in ranks):
            break  # the others would wait for it
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    if codes != [0] * count:
        first = [rank for rank, code in enumerate(codes) if code] or range(count)
        files = [folder / f"rank_{rank}.log" for rank in first]
        logs = "\n".join(log.read_text()[-4000:] for log in files if log.exists())
        raise RuntimeError(f"ranks ended with {codes} (None: still at work then):\n{logs}")
