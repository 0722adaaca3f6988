"""The numbers of a step over all ranks, by one all-reduce: loss, gradient norm, tokens and requests to stop.

every rank   logged terms | tokens | request to stop | squared gradient norm      summed over all ranks, float64
             in fp16, whether a gradient overflowed
device       loss, gradient norm, factor of the gradients, whether the update is applied, next loss scale
host         a copy of them, which it reads when it needs them; until then it does not wait for the device
"""

import math
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dit.backends import device
from dit.backends.graphs import Runner, call
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import ProcessGroups
from dit.optimizer.master_weights import squared_gradient_norm
from dit.parallel.loss_scale import loss_scale_of


@dataclass(frozen=True)
class Limits:
    """Largest loss and gradient norm of a step whose update is applied."""

    loss: float = sys.float_info.max
    grad_norm: float = sys.float_info.max


class HostNumbers(NamedTuple):
    """Numbers of a step on the host, equal on every rank.

    Attributes:
        grad_norm: norm before clipping.
        must_stop: whether any rank asks to stop after the step.
        is_good: whether loss and norm are finite and within the limits, and no gradient overflowed; otherwise, the
            device omits the update.
        loss_scale: loss scale of the next step in fp16.
    """

    loss: float
    grad_norm: float
    must_stop: bool
    is_good: bool
    overflowed: bool = False
    loss_scale: float = 1.0


class StepNumbers:
    """The numbers of a step, from the gradients that the backward pass left on this rank.

    The constructor is collective and does not wait for the device. It copies the gradients to the `grad` of the master
    weights, sums the numbers over all ranks, and sets the optimizer's gradient factor.

    Args:
        sums: sums of this rank in the step, `[terms + 1]`: the logged terms and the tokens; zeros on pipeline stages
            before the last one.
        num_terms: number of terms, the first ones, that add up to the loss.
        stop: whether this rank asks to stop after the step.

    Attributes:
        on_device: loss, gradient norm, requests, 1, or NaN to omit the update, gradient factor, and in fp16 overflows
            and the next loss scale, `[5]` or `[7]`, float64.
    """

    @torch.no_grad()
    def __init__(
        self,
        optimizer: MegatronOptimizer,
        groups: ProcessGroups,
        sums: Tensor,
        num_terms: int,
        *,
        stop: bool = False,
        limits: Limits = Limits(),
        run: Runner = call,
    ) -> None:
        optimizer.prepare_grads()
        host = device.device_numbers([limits.loss, limits.grad_norm, float(stop)], torch.float64)
        self.on_device = run(partial(_reduce, optimizer, groups, num_terms), torch.cat([host, sums.double()]))
        optimizer.gradient_factor.value = self.on_device[4]
        self._read = device.begin_copy_to_host(self.on_device)

    @cached_property
    def host(self) -> HostNumbers:
        """The numbers on the host; the first access waits until the device has computed them."""
        loss, grad_norm, requests, is_good, _, *scaling = self._read()
        overflows, *scale = scaling or [0.0]
        return HostNumbers(loss, grad_norm, requests > 0, is_good > 0, overflows > 0, *scale)


def _reduce(optimizer: MegatronOptimizer, groups: ProcessGroups, num_terms: int, local: Tensor) -> Tensor:
    """Return `StepNumbers.on_device`; `local` has the limits of loss and norm, the request to stop, and the sums."""
    scale = loss_scale_of(optimizer)
    overflows = [] if scale is None else [scale.found_inf.double()]
    reduced = torch.cat([local[2:], squared_gradient_norm(optimizer), *overflows])
    dist.all_reduce(reduced)
    requests, *terms, tokens, squares = reduced[: len(reduced) - len(overflows)].unbind()
    # Each token is counted by every tensor-parallel rank. The mean contains the losses of all of them, so a rank that
    # computes another loss changes it. Without tokens, the loss is NaN and the factor stays finite.
    loss = sum(terms[:num_terms], start=torch.zeros_like(tokens)) / tokens
    factor = (tokens / groups.tp.size()).clamp(min=1).reciprocal()
    grad_norm = squares.sqrt() * factor / math.sqrt(optimizer.gradient_copies)
    # A limit is finite, and comparisons with NaN are false.
    is_good = (loss > -math.inf) & (loss <= local[0]) & (grad_norm <= local[1])
    scaling = []
    if scale is not None:
        overflowed = reduced[-1] > 0
        is_good &= ~overflowed
        scaling = [reduced[-1], scale.adapt(overflowed, loss.isfinite())[0].double()]
    return torch.stack([loss, grad_norm, requests, torch.where(is_good, 1.0, math.nan).double(), factor, *scaling])
