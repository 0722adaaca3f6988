"""The mean loss of a step and the requests to stop, over all ranks."""

import torch
import torch.distributed as dist

from dit.backends import device
from dit.backends.process_groups import ProcessGroups
from dit.layout import to_device
from dit.objectives.base import Objective


class MeanLoss:
    """The loss of a step and the requests to stop after it, over all ranks, while they are copied to the host.

    The device sums over ranks after the backward pass (collective over all ranks) and starts a copy to the host. The
    host reads it after it has waited for the gradient norm, so reading it adds no wait.

    Args:
        sums: sums of this rank in the step: the logged terms and the tokens; zeros on ranks without a loss.
        stop: whether this rank asks to stop after the step.
    """

    def __init__(self, sums: torch.Tensor, objective: Objective, groups: ProcessGroups, *, stop: bool = False) -> None:
        self._num_terms = len(objective.terms)
        # Tensor-parallel ranks have equal sums. Their average, not one of them, so that a wrong rank changes the loss.
        request = to_device(torch.tensor([float(stop)]), sums.device)
        reduced = torch.cat([sums / groups.tp.size(), request])
        dist.all_reduce(reduced)
        self._read = device.begin_copy_to_host(reduced)

    def value(self) -> float:
        """Return the mean over all tokens of the step; the same on every rank."""
        *terms, tokens, _ = self._read()
        return sum(terms[: self._num_terms]) / tokens if tokens else float("nan")

    def must_stop(self) -> bool:
        """Return whether any rank asks to stop; the same on every rank."""
        return self._read()[-1] > 0
