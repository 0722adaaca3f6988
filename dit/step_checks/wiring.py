"""Is a run wired as it should be: all parameters learn, replicas read different samples, their ranks the same ones.

A parameter may have a zero gradient in its first steps by design: it is behind one that starts as zeros, as all blocks
of adaLN-Zero are behind their gates, and these behind the head. Each update moves what was reached, so no list of such
parameters is needed: after `n` updates a gradient passes `n` zeros one behind another. Two are the most in any
backbone; conditions that are dropped at random may need more steps to appear. So gradients are looked at in the 3rd,
10th and 20th update of every start, until all parameters were seen with one, and at the end of a shorter run.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.errors import DataError
from dit.monitoring.run_log import RunLog
from dit.optimizer.master_weights import MasterShard

LOOKS = (3, 10, 20)
NUM_NAMES = 8


class FirstSteps:
    """Checks of the first steps of one process; it is done when all is well, or after the last look.

    Args:
        shards: this rank's master shards.
    """

    def __init__(self, shards: Sequence[MasterShard], groups: ProcessGroups) -> None:
        self._shards, self._groups = shards, groups
        self._seen: Optional[torch.Tensor] = None
        self._updates = 0
        self._inputs = ""
        self.done = False

    def check_inputs(self, batch: PackedBatch, step: int, log: RunLog) -> None:
        """Compare what ranks read, before anything is computed from it; every rank calls this.

        Args:
            batch: the first full pack of this rank, as the source made it.
            step: in which it is trained on.

        Raises:
            DataError: ranks that share a model read different samples.
        """
        gathered: list[Any] = [None] * self._groups.world_size
        dist.all_gather_object(gathered, (self._groups.dp_rank, _digest(batch)))
        by_replica: dict[int, list[int]] = {}
        for rank, (replica, _) in enumerate(gathered):
            by_replica.setdefault(replica, []).append(rank)
        for replica, ranks in by_replica.items():
            other = next((rank for rank in ranks if gathered[rank][1] != gathered[ranks[0]][1]), None)
            if other is not None:
                raise DataError(
                    f"step {step}: ranks {ranks[0]} and {other} are parts of replica {replica} and read different "
                    "samples; their data folders differ, or a data source of your own depends on more than dp_rank and "
                    "seed"
                )
        first_with: dict[str, int] = {}
        for replica, ranks in by_replica.items():
            first = first_with.setdefault(gathered[ranks[0]][1], replica)
            if first != replica:
                log.message(f"first steps: replicas {first} and {replica} read the same samples in step {step}")
                log.incident("same_samples", step, replicas=[first, replica])
                return
        replicas = f"; {len(by_replica)} replicas read different samples" if len(by_replica) > 1 else ""
        peers, which = len(by_replica[0]), "each" if replicas else "the"
        self._inputs = replicas + (f"; the {peers} ranks of {which} replica read the same" if peers > 1 else "")

    def look(self, step: int, learning_rate: float, log: RunLog) -> None:
        """Look at the gradients of a step before its update; every rank calls this.

        Args:
            step: its number.
            learning_rate: of the update; one of 0 moves nothing.
        """
        if self.done:
            return
        if self._shards:
            seen = torch.stack([(shard.grad != 0).any() for shard in self._shards])
            self._seen = seen if self._seen is None else self._seen | seen
        self._updates += learning_rate > 0
        if self._updates in LOOKS:
            self._judge(step, log, is_last=self._updates == LOOKS[-1])

    def end(self, step: int, log: RunLog) -> None:
        """Judge a run that made fewer updates than the last look waits for; every rank calls this when it is over.

        Args:
            step: the last one; how many of them were applied does not matter.
        """
        if not self.done and self._updates:
            self._judge(step, log, is_last=True)

    def _judge(self, step: int, log: RunLog, *, is_last: bool) -> None:
        total, missing = self._missing()
        if missing and not is_last:
            return
        self.done = True
        if not missing:
            log.message(f"first steps: all {total} parameters have a gradient{self._inputs}")
            return
        names = ", ".join(missing[:NUM_NAMES]) + (
            f" and {len(missing) - NUM_NAMES} more" if missing[NUM_NAMES:] else ""
        )
        log.message(
            f"first steps: {len(missing)} of {total} parameters had no gradient in {self._updates} updates: {names}; "
            "either nothing that is trained on reads them, or their gradient is lost"
        )
        log.incident("no_gradient", step, parameters=missing)

    def _missing(self) -> tuple[int, list[str]]:
        """Return the number of parameters, and the names of those that had a gradient on no rank."""
        names = [shard.name for shard in self._shards]
        mine = dict(zip(names, [] if self._seen is None else self._seen.tolist()))
        unseen: list[Any] = [None] * self._groups.world_size
        dist.all_gather_object(unseen, [name for name, seen in mine.items() if not seen])
        suspected = {name for names_of_rank in unseen for name in names_of_rank}
        told: list[Any] = [None] * self._groups.world_size
        dist.all_gather_object(told, [name for name in suspected if mine.get(name)])
        everywhere: list[Any] = [None] * self._groups.world_size
        dist.all_gather_object(everywhere, names)  # of each stage, and of the experts of each expert-parallel rank
        total = len({name for names_of_rank in everywhere for name in names_of_rank})
        return total, sorted(suspected - {name for names_of_rank in told for name in names_of_rank})


def _digest(batch: PackedBatch) -> str:
    """Return a hash of the samples of a pack, and of the numbers of their draws."""
    found = hashlib.blake2b(repr(batch.keys).encode(), digest_size=16)
    pixels = () if batch.raw is None or batch.raw.pixels is None else batch.raw.pixels
    for tensor in (batch.sample_ids_S, batch.draws_S, batch.latents_TC, *pixels):
        if tensor is not None:
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
