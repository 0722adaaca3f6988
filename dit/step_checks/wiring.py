"""Sanity checks of the first steps: gradients of all parameters, samples of each replica, scale of the latents.

Replicas must read different samples, and the ranks of a replica the same ones.

A parameter may have a zero gradient in the first steps by design, because a layer after it starts as zeros: in
adaLN-Zero, a block is multiplied by its gates, and its output by the head. Each update makes the next layer nonzero, so
after `n` updates a gradient passes `n` such layers. No backbone has more than two, but conditions that are dropped at
random may need more steps to appear. Gradients are therefore checked in the 3rd, 10th and 20th update of every start,
until each parameter had one, and at the end of a shorter run.
"""

import hashlib
from collections.abc import Sequence
from typing import Optional

import torch

from dit.backends.process_groups import ProcessGroups, gather_objects
from dit.batch import PackedBatch
from dit.errors import DataError, first_few
from dit.monitoring.run_log import RunLog
from dit.optimizer.master_weights import MasterShard

REPORTS = (3, 10, 20)
"""Updates after which parameters without a gradient are reported."""
NUM_NAMES = 8
MAX_STD = 5.0
"""Standard deviation of latents above which a warning is logged; training expects about 1."""


class FirstSteps:
    """Checks of the first steps after a start, until all pass or the last report."""

    def __init__(self, shards: Sequence[MasterShard], groups: ProcessGroups) -> None:
        self._shards, self._groups = shards, groups
        self._seen: Optional[torch.Tensor] = None
        self._updates = 0
        self._inputs = ""
        self.done = False

    def check_inputs(self, batch: PackedBatch, step: int, log: RunLog) -> None:
        """Compare the samples that ranks read, and check their scale, before the first step; every rank calls this.

        Args:
            batch: first full pack of this rank, as the source returned it.
        """
        if (std := _latent_std(batch)) > MAX_STD:
            log.message(
                f"first steps: the latents have a standard deviation of {std:.3g}, training expects about 1; scale "
                "pixels to [-1, 1] (x / 127.5 - 1), or latents by the scaling factor of their autoencoder"
            )
        gathered = gather_objects((self._groups.dp_rank, _digest(batch)))
        by_replica: dict[int, list[int]] = {}
        for rank, (replica, _) in enumerate(gathered):
            by_replica.setdefault(replica, []).append(rank)
        for replica, ranks in by_replica.items():
            other = next((rank for rank in ranks if gathered[rank][1] != gathered[ranks[0]][1]), None)
            if other is not None:
                raise DataError(
                    f"step {step}: ranks {ranks[0]} and {other} are parts of replica {replica} and read different "
                    "samples; their data folders differ, or a custom data source depends on more than dp_rank and seed"
                )
        first_replica: dict[str, int] = {}
        for replica, ranks in by_replica.items():
            first = first_replica.setdefault(gathered[ranks[0]][1], replica)
            if first != replica:
                log.message(f"first steps: replicas {first} and {replica} read the same samples in step {step}")
                log.incident("same_samples", step, replicas=[first, replica])
                return
        replicas = f"; {len(by_replica)} replicas read different samples" if len(by_replica) > 1 else ""
        peers, which = len(by_replica[0]), "each" if replicas else "the"
        self._inputs = replicas + (f"; the {peers} ranks of {which} replica read the same" if peers > 1 else "")

    def check_gradients(self, step: int, learning_rate: float, log: RunLog) -> None:
        """Record the parameters with a gradient, before the update of a step; every rank calls this.

        Args:
            learning_rate: learning rate of the update; an update with rate 0 does not count.
        """
        if self.done:
            return
        if self._shards:
            seen = torch.stack([(shard.grad != 0).any() for shard in self._shards])
            self._seen = seen if self._seen is None else self._seen | seen
        self._updates += learning_rate > 0
        if self._updates in REPORTS:
            self._report(step, log, is_last=self._updates == REPORTS[-1])

    def end(self, step: int, log: RunLog) -> None:
        """Report at the end of a run with fewer updates than the last report needs; every rank calls this."""
        if not self.done and self._updates:
            self._report(step, log, is_last=True)

    def _report(self, step: int, log: RunLog, *, is_last: bool) -> None:
        total, missing = self._missing()
        if missing and not is_last:
            return
        self.done = True
        if not missing:
            log.message(f"first steps: all {total} parameters have a gradient{self._inputs}")
            return
        log.message(
            f"first steps: {len(missing)} of {total} parameters had no gradient in {self._updates} updates: "
            f"{first_few(missing, NUM_NAMES)}; either a layer after them still outputs zeros (train at least 3 steps), "
            "no sample was dropped that they replace, no trained output depends on them, or their gradient is lost"
        )
        log.incident("no_gradient", step, parameters=missing)

    def _missing(self) -> tuple[int, list[str]]:
        """Return the number of parameters, and the names of parameters without a gradient on any rank."""
        names = [shard.name for shard in self._shards]
        seen = dict(zip(names, [] if self._seen is None else self._seen.tolist()))
        # Stages and expert-parallel ranks have different parameters.
        ranks = gather_objects((names, [name for name in names if seen.get(name)]))
        parameters = {name for rank_names, _ in ranks for name in rank_names}
        return len(parameters), sorted(parameters - {name for _, rank_seen in ranks for name in rank_seen})


def _latent_std(batch: PackedBatch) -> float:
    """Return the standard deviation of a pack's latents; 0 if they are still to be encoded."""
    if batch.raw is not None:
        return 0.0
    return float(batch.latents_TC[batch.layout.valid_T].float().std(correction=0))


def _digest(batch: PackedBatch) -> str:
    """Return a hash of a pack's samples and of the numbers of their draws."""
    digest = hashlib.blake2b(repr(batch.keys).encode(), digest_size=16)
    pixels = () if batch.raw is None or batch.raw.pixels is None else batch.raw.pixels
    for tensor in (batch.sample_ids_S, batch.draws_S, batch.latents_TC, *pixels):
        if tensor is not None:
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
