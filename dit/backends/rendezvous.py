"""A namespace in the launcher's store for every attempt of a job.

After a restart, torchrun gives the new ranks the store of the old ranks, including its keys. A rank that reads the old
address of a peer waits for it until the time-out (pytorch/pytorch#135712). The number of restarts cannot identify an
attempt, because the torchrun of every node counts separately. So rank 0 creates an id, and all ranks agree on it:

    rank 0                                        rank r
    attempt = A (new)                             reads attempt, perhaps an old one
    waits for the nonces of all ranks under A     writes its nonce under A
    under A: go = all nonces                      waits for go under A; reads attempt again if its nonce is not in go
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
    """Return a view of a store that no earlier attempt has used (collective).

    Raises:
        DistStoreError: the other ranks did not respond in time.
    """
    attempt = _lead(store, world_size, timeout_s) if rank == 0 else _follow(store, rank, timeout_s)
    return dist.PrefixStore(f"dit/{attempt}", store)


def _lead(store: dist.Store, world_size: int, timeout_s: float) -> str:
    attempt = uuid.uuid4().hex
    store.set(ATTEMPT, attempt)
    keys = [f"dit/{attempt}/nonce_{rank}" for rank in range(1, world_size)]
    if keys:
        store.wait(keys, timedelta(seconds=timeout_s))
    store.set(f"dit/{attempt}/go", json.dumps([store.get(key).decode() for key in keys]))
    return attempt


def _follow(store: dist.Store, rank: int, timeout_s: float) -> str:
    nonce, joined, deadline = uuid.uuid4().hex, "", time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            store.wait([ATTEMPT], timedelta(seconds=LOOK_S))
            attempt = store.get(ATTEMPT).decode()
            if attempt != joined:
                store.set(f"dit/{attempt}/nonce_{rank}", nonce)
                joined = attempt
            store.wait([f"dit/{attempt}/go"], timedelta(seconds=LOOK_S))
        except dist.DistStoreError:
            continue
        nonces = parse_json(store.get(f"dit/{attempt}/go"))
        if rank <= len(nonces) and nonces[rank - 1] == nonce:  # an earlier attempt may have had fewer ranks
            return attempt
        time.sleep(LOOK_S / 10)  # an earlier attempt; rank 0 has not begun the next one
    raise dist.DistStoreError(f"rank 0 did not begin within {timeout_s:.0f} s: timed out waiting")
