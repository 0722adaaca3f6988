"""Start gloo ranks on this machine, and run the same cases on each of them.

Ranks are forked from one process that has imported all modules, which makes a rank start ten times faster.
"""

import gc
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dit.errors import UserError

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["dit.verify.preload"])  # benchmarks and tests have longer lists


def free_port() -> int:
    """Find a free port outside the range of ephemeral ports, because ranks bind it only seconds later."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port


def _rank(main: Callable[[Path, int], None], folder: Path, rank: int) -> None:
    """Run one rank; the process writes its output to its own log file."""
    import torch

    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    for name in [name for name in os.environ if name.startswith(("WANDB", "TORCHELASTIC"))]:
        del os.environ[name]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "DIT_DEVICE": "cpu", "WANDB_MODE": "offline"}
    torch.set_num_threads(1)
    try:
        main(folder, rank)
    except BaseException as error:
        if isinstance(error, UserError):
            (folder / f"rank_{rank}.error").write_bytes(pickle.dumps(error))
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_ranks(main: Callable[[Path, int], None], count: int, folder: Path, *, timeout_s: float) -> None:
    """Run `main(folder, rank)` in `count` processes; each writes `folder/rank_N.log`.

    Raises:
        RuntimeError: a rank failed otherwise, or the time limit passed; the message ends with the ranks' last output.
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
        errors = [file for rank in first if (file := folder / f"rank_{rank}.error").exists()]
        if errors:
            raise pickle.loads(errors[0].read_bytes())
        files = [folder / f"rank_{rank}.log" for rank in first]
        logs = "\n".join(log.read_text()[-4000:] for log in files if log.exists())
        raise RuntimeError(f"ranks ended with {codes} (None: still running then):\n{logs}")


def run_world(
    world_size: int,
    cases: Sequence[dict[str, Any]],
    folder: Path,
    *,
    timeout_s: float = 900.0,
) -> list[Any]:
    """Run every case on `world_size` ranks, in one start, and return rank 0's result of each.

    Args:
        cases: each has a key `task`, "module:function"; the function is called with the case.

    Raises:
        UserError, RuntimeError: see `run_ranks`.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.pkl").write_bytes(pickle.dumps(list(cases)))
    run_ranks(partial(_rank_of_world, world_size, free_port()), world_size, folder, timeout_s=timeout_s)
    return torch.load(folder / "results.pt", weights_only=False)


def _rank_of_world(world_size: int, port: int, folder: Path, rank: int) -> None:
    """Run the cases of a folder on this rank; rank 0 writes the results to the folder."""
    import torch

    from dit.backends import process_groups

    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in launched.items()}
    torch.set_num_threads(1)
    cases = pickle.loads((folder / "cases.pkl").read_bytes())
    tasks = [case["task"].split(":") for case in cases]
    functions = [getattr(import_module(module), name) for module, name in tasks]
    gc.freeze()  # keeps imported objects out of garbage collections, which Megatron-FSDP triggers for every model
    results = []
    for case, function in zip(cases, functions):
        results.append(function(case))
        gc.collect()  # models refer to process groups, whose threads end only when they are collected
    if rank == 0:
        torch.save(results, folder / "results.pt")  # several times as fast as pickling tensors one by one
    process_groups.destroy()
