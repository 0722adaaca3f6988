"""The mean loss of a step over all ranks."""

import torch
import torch.distributed as dist

from dit.backends import device
from dit.backends.process_groups import ProcessGroups
from dit.objectives.base import Objective


class MeanLoss:
    """The loss of a step over all ranks, while it is copied to the host.

    The sum over ranks follows the backward pass on the device. The host reads it after the gradient norm, which is
    computed later, so reading it adds no wait.

    Args:
        sums: sums of this rank in the step: the logged terms and the tokens; zeros on ranks without a loss.
    """

    def __init__(self, sums: torch.Tensor, objective: Objective, groups: ProcessGroups) -> None:
        self._num_terms = len(objective.terms)
        # Tensor-parallel ranks have equal sums; averaging them shows a rank that is at fault.
        reduced = sums / groups.tp.size()
        dist.all_reduce(reduced)
        self._read = device.begin_copy_to_host(reduced)

    def value(self) -> float:
        """Return the mean over all tokens of the step; the same on every rank."""
        *terms, tokens = self._read()
        return sum(terms[: self._num_terms]) / tokens if tokens else float("nan")
