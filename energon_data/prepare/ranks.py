"""Several processes that prepare one data set together, on one machine or many: started by torchrun or srun.

They share the folder that is made, and wait for each other at three points: when unfinished work of an earlier start
was recognised, when all units are finished, and when everyone has read their records.
"""

import os
from datetime import timedelta

LONGEST_WAIT = timedelta(days=30)  # for the slowest rank's units


class Ranks:
    """This process among those that were started together; alone without a launcher.

    Attributes:
        rank: number of this process.
        count: how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    @property
    def is_first(self) -> bool:
        """Whether this process opens and publishes the data set, and reports."""
        return self.rank == 0

    def wait(self) -> None:
        """Return when all processes have come here."""
        if self.count == 1:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=LONGEST_WAIT)
        dist.barrier()
