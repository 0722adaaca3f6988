"""One optimizer step, from zero gradients to the update. Training, `dit.verify` and the planner call it."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, Optional, Protocol

import torch
from torch import Tensor

from dit.backends.device import local_device
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.objectives.base import Objective
from dit.optimizer.master_weights import gradient_norm, set_rates
from dit.optimizer.update import Update
from dit.parallel.loss_scale import LossScale
from dit.step.forward_step import ForwardStep
from dit.step.mean_loss import MeanLoss
from dit.step.schedule import forward_backward

Action = Literal["update", "skip", "rewind", "overflow"]
"""Use of a step's gradients: an update; no update; back to the last checkpoint; no update, and a lower loss scale."""

Part = Literal["forward and backward", "loss", "gradient norm", "update", "end"]

Logs = list[dict[str, Any]]
"""Logs of the loss function for each micro-batch; empty on pipeline stages before the last one."""

Compute = Callable[[Iterator[PackedBatch]], Logs]
"""Computes the gradients of a step from its micro-batches, starting from zero."""


class StepState(Protocol):
    """The state that a step changes: `dit.checkpoint.train_state.TrainState`, or a smaller one."""

    wrapped: Sequence[Any]
    optimizer: MegatronOptimizer
    loss_scale: Optional[LossScale]
    groups: ProcessGroups
    step: int

    @property
    def update(self) -> Update:
        """Update of the weights and their average."""


@dataclass(frozen=True)
class StepFunctions:
    """Functions and sizes that do not change between the steps of a run.

    Attributes:
        objective: objective of the run.
        forward_step: returns the forward step that follows a number of completed steps.
        rates: returns learning rate and Adam's beta1 of the update that follows a number of completed steps.
        micro_batches: micro-batches of each replica in a step.
    """

    objective: Objective
    forward_step: Callable[[int], ForwardStep]
    rates: Callable[[int], tuple[float, float]]
    micro_batches: int


@dataclass
class Step:
    """A step whose gradients have been reduced.

    Attributes:
        number: number of the step, from 1.
        forward_step: forward step of its micro-batches.
        sums: local sums of the logged terms and of the tokens, `[logged + 1]`.
        grad_norm: global gradient norm before clipping; infinite if an fp16 gradient overflowed.
        overflowed: whether an fp16 gradient overflowed.
        action: use of the gradients.
    """

    number: int
    forward_step: ForwardStep
    sums: Tensor
    mean_loss: MeanLoss
    grad_norm: float
    overflowed: bool = False
    action: Action = "update"

    @cached_property
    def loss(self) -> float:
        """Mean loss over the tokens of all ranks."""
        return self.mean_loss.value()

    @property
    def must_stop(self) -> bool:
        """Whether any rank asks to stop after this step."""
        return self.mean_loss.must_stop()


class StepObserver:
    """Calls from a step to its checks and timers; this base class changes nothing and accepts every step."""

    def enter(self, part: Part) -> None:
        """Start a part of the step."""

    def compute(self, compute: Compute, batches: Iterator[PackedBatch]) -> Logs:
        """Compute the gradients once, or several times to compare them; the last result is used."""
        return compute(batches)

    def stop_requested(self) -> bool:
        """Return whether this rank asks to stop after the step; called once per step."""
        return False

    def judge(self, step: Step) -> Action:
        """Decide on the update; every rank returns the same."""
        return "update"

    def discard(self, step: Step) -> None:
        """Forget the counts of a step that makes no update."""


def train_step(
    state: StepState,
    batches: Iterator[PackedBatch],
    functions: StepFunctions,
    observer: StepObserver,
) -> Step:
    """Run one optimizer step; the host waits for the device once, for the gradient norm.

    Every step but a rewound one increments `state.step`, also without an update.

    Args:
        batches: this replica's micro-batches; local tokens under context parallelism.
    """
    observer.enter("forward and backward")
    forward_step, scale = functions.forward_step(state.step), state.loss_scale
    if scale is not None and scale.tokens is None:
        first = next(batches)
        scale.start(first.layout.valid_tokens)
        batches = itertools.chain([first], batches)

    compute = partial(compute_gradients, state, forward_step, functions.micro_batches)
    logs = observer.compute(compute, batches)

    observer.enter("loss")
    zeros = torch.zeros(len(functions.objective.logged) + 1, device=local_device())
    sums = sum((log["sums"] for log in logs), zeros)
    mean_loss = MeanLoss(sums, functions.objective, state.groups, stop=observer.stop_requested())

    observer.enter("gradient norm")
    set_rates(state.optimizer, *functions.rates(state.step))
    step = Step(state.step + 1, forward_step, sums, mean_loss, gradient_norm(state.optimizer))
    if scale is not None and scale.settle(adapt=math.isfinite(step.loss)):
        step.overflowed, step.grad_norm = True, math.inf
    if step.overflowed and scale is not None and scale.shrank:
        step.action = "overflow"  # the next step has a lower scale
    else:
        step.action = observer.judge(step)

    if step.action == "update":
        observer.enter("update")
        state.update(step.grad_norm, step.number)
    else:
        observer.discard(step)
    observer.enter("end")
    state.step += step.action != "rewind"
    return step


def compute_gradients(
    state: StepState, forward_step: ForwardStep, micro_batches: int, batches: Iterator[PackedBatch]
) -> Logs:
    """Set the gradients to zero, run all micro-batches forward and backward, and reduce the gradients over ranks."""
    for chunk in state.wrapped:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    return forward_backward(forward_step, batches, state.wrapped, micro_batches, state.groups)
