"""Every attempt of a job has a separate store, also if the launcher's store has keys of earlier attempts."""

import threading
import time

import pytest
import torch.distributed as dist

from dit.backends import rendezvous
from dit.backends.rendezvous import ATTEMPT, store_of_attempt

RANKS = 3


def meet(store, delays):
    """Let one rank per delay meet after its delay; return the value from rank 0 that each rank reads."""
    found = {}

    def rank_of(rank):
        time.sleep(delays[rank])
        own = store_of_attempt(store, rank, len(delays), 20.0)
        if rank == 0:
            own.set("address", f"{delays}")
        found[rank] = own.get("address").decode()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(len(delays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(rank) for rank in range(len(delays))]


@pytest.mark.parametrize("first", range(RANKS))
def test_an_attempt_does_not_see_the_keys_of_those_before(first):
    """Whichever rank is last: the store keeps the values of the previous attempt."""
    store = dist.HashStore()
    for last in (first, 0, 1, 2):
        delays = [0.2 * (rank == last) for rank in range(RANKS)]
        assert meet(store, delays) == [f"{delays}"] * RANKS


@pytest.mark.parametrize("late", [0, 3])
def test_a_job_restarts_on_more_ranks_and_on_fewer(late):
    """`torchrun --nnodes 1:2`: a new rank reads a store written by an attempt on fewer ranks."""
    store = dist.HashStore()
    for ranks in (2, 4, 1, 2):
        delays = [0.2 * (rank == late) for rank in range(ranks)]
        assert meet(store, delays) == [f"{delays}"] * ranks


def test_an_attempt_that_never_started_is_ignored():
    """Rank 0 and one other rank died before they met; their keys are still in the store."""
    store = dist.HashStore()
    store.set(ATTEMPT, "dead")
    store.set("dit/dead/nonce_1", "of a process that is gone")
    assert meet(store, [0.3, 0.0, 0.0]) == ["[0.3, 0.0, 0.0]"] * RANKS


def test_a_rank_without_peers_times_out(monkeypatch):
    monkeypatch.setattr(rendezvous, "LOOK_S", 0.05)
    with pytest.raises(dist.DistStoreError, match="did not begin"):
        store_of_attempt(dist.HashStore(), 1, 2, 0.3)
    with pytest.raises(dist.DistStoreError):
        store_of_attempt(dist.HashStore(), 0, 2, 0.3)
