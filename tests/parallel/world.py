"""Start a world of gloo ranks once and run many cases inside it.

Ranks are forked from one process that has imported everything, which takes a rank a tenth of its start.
"""

import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.parallel.preload"])


def free_port() -> int:
    """Find a port below those the system hands out: the ranks bind it seconds later, when such a one may be taken."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port


def _rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Be one rank, in a process of its own."""
    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(ROOT)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DIT_DEVICE": "cpu",
    }
    from tests.parallel.worker import main

    try:
        main(folder)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_world(world_size: int, cases: list[dict], folder: Path, *, timeout_s: float = 900.0) -> list[dict]:
    """Run every case on `world_size` ranks, in one start, and return rank 0's result of each.

    Raises:
        RuntimeError: a rank failed, or they took too long; the message holds the end of their output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.pkl").write_bytes(pickle.dumps(cases))
    port = free_port()
    ranks = [FORKS.Process(target=_rank, args=(rank, world_size, port, folder)) for rank in range(world_size)]
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
    if codes != [0] * world_size:
        first = [rank for rank, code in enumerate(codes) if code] or range(world_size)
        files = [folder / f"rank_{rank}.log" for rank in first]
        logs = "\n".join(log.read_text()[-3000:] for log in files if log.exists())
        raise RuntimeError(f"ranks ended with {codes} (None: still at work then):\n{logs}")
    return pickle.loads((folder / "results.pkl").read_bytes())
