"""The mean loss of a step over all ranks."""

import torch
import torch.distributed as dist

from dit.backends.device import begin_copy_to_host
from dit.backends.process_groups import ProcessGroups
from dit.objectives.base import Objective


class MeanLoss:
    """The loss of a step over all ranks, on the way to the host.

    One sum over all ranks follows the backward pass on the device. The host reads the result after it has waited for
    the gradient norm, which is computed later: it does not wait again.

    Args:
        sums: of this rank in this step, what the objective logs, and the tokens; zeros where there is no loss.
    """

    def __init__(self, sums: torch.Tensor, objective: Objective, groups: ProcessGroups) -> None:
        self._summands = len(objective.terms)
        # Tensor-parallel ranks have the same sums, unless one of them is at fault: its share shows.
        reduced = sums / groups.tp.size()
        dist.all_reduce(reduced)
        self._read = begin_copy_to_host(reduced)

    def value(self) -> float:
        """Return the mean over all tokens of the step; the same on every rank."""
        *terms, tokens = self._read()
        return sum(terms[: self._summands]) / tokens if tokens else float("nan")
