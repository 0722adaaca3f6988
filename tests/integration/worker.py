"""One process of a world of tests: does the jobs it is given, one after the other."""

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist


def main(folder: Path, rank: int) -> None:
    from dit.backends import process_groups

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    results: dict[str, Any] = {}
    for name, job, port in pickle.loads((folder / "jobs.pkl").read_bytes()):
        if rank >= job.ranks:
            continue
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "MASTER_PORT": port}
        for variable, value in launched.items():
            if job.ranks > 1:
                os.environ[variable] = str(value)
            else:
                os.environ.pop(variable, None)
        print(f"--- {name}", flush=True)
        results[name] = job.action(**job.arguments)
        if dist.is_initialized():  # a run that failed leaves its groups behind
            process_groups.destroy()
    (folder / f"results_{rank}.pkl").write_bytes(pickle.dumps(results))
