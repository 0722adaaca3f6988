"""A namespace in the launcher's store for every attempt of a job.

torchrun gives the ranks that it starts again the store of the ranks that died, with their keys: a rank that reads the
old address of its peer waits for it until the time-out (pytorch/pytorch#135712). The number of restarts cannot name
an attempt, because the torchrun of every node counts its own. So rank 0 names it, and makes sure that all ranks know:

    rank 0                                        rank r
    attempt = A (new)                             reads attempt, perhaps an old one
    waits for the nonces of all ranks under A     writes a nonce of its own under it
    under A: go = all nonces                      waits for go there; its own nonce is in it, or it reads attempt again
"""

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from dit.safe_files import parse_json

ATTEMPT = "dit/attempt"
LOOK_S = 0.5


def store_of_attempt(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Return the part of a store that no earlier attempt has used; every rank calls this.

    Args:
        store: shared by all ranks, perhaps with keys of earlier attempts.
        rank, world_size: of this process and of the job.
        timeout_s: to wait for the others.

    Raises:
        DistStoreError: the others did not come.
    """
    named = _lead(store, world_size, timeout_s) if rank == 0 else _follow(store, rank, timeout_s)
    return dist.PrefixStore(f"dit/{named}", store)


def _lead(store: dist.Store, world_size: int, timeout_s: float) -> str:
    named = uuid.uuid4().hex
    store.set(ATTEMPT, named)
    keys = [f"dit/{named}/nonce_{rank}" for rank in range(1, world_size)]
    if keys:
        store.wait(keys, timedelta(seconds=timeout_s))
    store.set(f"dit/{named}/go", json.dumps([store.get(key).decode() for key in keys]))
    return named


def _follow(store: dist.Store, rank: int, timeout_s: float) -> str:
    nonce, joined, deadline = uuid.uuid4().hex, "", time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            store.wait([ATTEMPT], timedelta(seconds=LOOK_S))
            named = store.get(ATTEMPT).decode()
            if named != joined:
                store.set(f"dit/{named}/nonce_{rank}", nonce)
                joined = named
            store.wait([f"dit/{named}/go"], timedelta(seconds=LOOK_S))
        except dist.DistStoreError:
            continue
        nonces = parse_json(store.get(f"dit/{named}/go"))
        if rank <= len(nonces) and nonces[rank - 1] == nonce:  # an attempt that is over may have had fewer ranks
            return named
        time.sleep(LOOK_S / 10)  # an attempt that is over; rank 0 has not begun the next one
    raise dist.DistStoreError(f"rank 0 did not begin within {timeout_s:.0f} s: timed out waiting")
