"""Start a world of gloo ranks once and run many cases inside it."""

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.forks import free_port, run_ranks


def _rank(world_size: int, port: int, folder: Path, rank: int) -> None:
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in launched.items()}
    from benchmarks.parallel_training import main

    main(folder)


def run_world(
    world_size: int, cases: list[dict[str, Any]], folder: Path, *, timeout_s: float = 900.0
) -> list[dict[str, Any]]:
    """Run every case on `world_size` ranks, in one start, and return rank 0's result of each.

    Raises:
        RuntimeError: a rank failed, or they took too long; the message holds the end of their output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.pkl").write_bytes(pickle.dumps(cases))
    run_ranks(partial(_rank, world_size, free_port()), world_size, folder, timeout_s=timeout_s)
    return pickle.loads((folder / "results.pkl").read_bytes())
