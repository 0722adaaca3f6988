"""Start a world of gloo ranks once and run many cases inside it."""

import os
import pickle
import random
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Find a port below those the system hands out: the ranks bind it seconds later, when such a one may be taken."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port


def run_world(world_size: int, cases: list[dict], folder: Path, *, timeout_s: float = 900.0) -> list[dict]:
    """Run every case on `world_size` ranks, in one start, and return rank 0's result of each.

    Raises:
        RuntimeError: a rank failed; the message holds the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.pkl").write_bytes(pickle.dumps(cases))
    port, ranks = free_port(), []
    for rank in range(world_size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "DIT_DEVICE": "cpu",
            "PYTHONPATH": str(ROOT),
        }
        with open(folder / f"rank_{rank}.log", "w") as log:
            command = [sys.executable, "-W", "ignore", "-m", "tests.parallel.worker", str(folder)]
            ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=timeout_s) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(codes):
        logs = "\n".join((folder / f"rank_{r}.log").read_text()[-3000:] for r, code in enumerate(codes) if code)
        raise RuntimeError(f"ranks ended with {codes}:\n{logs}")
    return pickle.loads((folder / "results.pkl").read_bytes())
