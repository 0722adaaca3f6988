"""Preparation by several processes on one or many machines, started by torchrun or srun.

The processes write to the same folder. They synchronise three times: after rank 0 has opened the folder, after all
units are finished, and after all records have been read.
"""

import os
from datetime import timedelta

LONGEST_WAIT = timedelta(days=30)  # for the units of the slowest rank


class Ranks:
    """Rank and number of the processes of a launcher; one process without a launcher."""

    def __init__(self) -> None:
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    @property
    def is_first(self) -> bool:
        """Whether this process opens and publishes the data set, and reports."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes call this."""
        if self.count == 1:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=LONGEST_WAIT)
        dist.barrier()
