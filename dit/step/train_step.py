"""One optimizer step, from zero gradients to the update. Training, `dit.verify` and the planner call it."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, Optional

import torch
from torch import Tensor

from dit.backends.device import local_device
from dit.backends.graphs import Runner, call
from dit.batch import PackedBatch
from dit.objectives.base import Objective
from dit.optimizer.master_weights import set_rates
from dit.optimizer.model_state import ModelState
from dit.optimizer.step_numbers import Limits, StepNumbers
from dit.step.forward_step import ForwardStep
from dit.step.schedule import Logs, Schedule, forward_backward

Action = Literal["update", "skip", "rewind", "overflow"]
"""Use of a step's gradients: an update; no update; back to the last checkpoint; no update, and a lower loss scale."""

Part = Literal["forward and backward", "numbers", "update", "end"]

Compute = Callable[[Iterator[PackedBatch]], Logs]
"""Computes the gradients of a step from its micro-batches, starting from zero."""


@dataclass(frozen=True)
class StepFunctions:
    """Functions and sizes that do not change between the steps of a run.

    Attributes:
        forward_step: returns the forward step that follows a number of completed steps.
        rates: returns learning rate and Adam's beta1 of the update that follows a number of completed steps.
        micro_batches: micro-batches of each replica in a step.
        schedule: runs all passes of a step.
        run_numbers: calls the operations of `StepNumbers`.
    """

    objective: Objective
    forward_step: Callable[[int], ForwardStep]
    rates: Callable[[int], tuple[float, float]]
    micro_batches: int
    schedule: Schedule = forward_backward
    run_numbers: Runner = call


@dataclass
class Step:
    """A step whose gradients have been reduced.

    Attributes:
        number: number of the step, from 1.
        forward_step: forward step of its micro-batches.
        sums: local sums of the logged terms and of the tokens, `[logged + 1]`.
        numbers: loss, gradient norm and requests to stop over all ranks.
        overflowed: whether an fp16 gradient overflowed.
        action: use of the gradients.
        is_pending: whether the host does not know yet if the device applies the update.
    """

    number: int
    forward_step: ForwardStep
    sums: Tensor
    numbers: StepNumbers
    overflowed: bool = False
    action: Action = "update"
    is_pending: bool = False

    @property
    def loss(self) -> float:
        """Mean loss over the tokens of all ranks."""
        return self.numbers.host.loss

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping; infinite if an fp16 gradient overflowed."""
        return math.inf if self.overflowed else self.numbers.host.grad_norm

    @property
    def must_stop(self) -> bool:
        """Whether any rank asks to stop after this step."""
        return self.numbers.host.must_stop


class StepObserver:
    """Calls from a step to its checks and timers; this base class changes nothing and does not check the numbers."""

    def enter(self, part: Part) -> None:
        """Start a part of the step."""

    def compute(self, compute: Compute, batches: Iterator[PackedBatch]) -> Logs:
        """Compute the gradients once, or several times to compare them; the last result is used."""
        return compute(batches)

    def stop_requested(self) -> bool:
        """Return whether this rank asks to stop after the step; called once per step."""
        return False

    def limits(self) -> Limits:
        """Return the limits of the loss and the norm of the current step."""
        return Limits()

    def judge(self, step: Step) -> Action:
        """Decide on the update; every rank returns the same. May overwrite the gradients of a bad step."""
        return "update"

    def discard(self, step: Step) -> None:
        """Forget the counts of a step that makes no update."""

    def repeat(self, compute: Compute) -> Logs:
        """Compute the gradients again from the batches of the last `compute`, after `discard` of the pending step."""
        raise NotImplementedError


def train_step(
    state: ModelState,
    batches: Iterator[PackedBatch],
    functions: StepFunctions,
    observer: StepObserver,
    previous: Optional[Step] = None,
    *,
    late: bool = False,
) -> Step:
    """Run one optimizer step.

    Every step but a rewound one increments `state.step`, also without an update.

                 host                                              device
        late     queue the update; return a pending step           update, unless the step is bad
                 next step: queue forward and backward, `settle`
        others   wait for the numbers; queue the update            update

    Args:
        batches: this replica's micro-batches; local tokens under context parallelism.
        previous: the step before, if it is pending; settled here. After the last step, the caller settles it.
        late: return without waiting for the device. Needs `Update.can_be_omitted`.
    """
    observer.enter("forward and backward")
    forward_step, scale = functions.forward_step(state.step), state.loss_scale
    if scale is not None and scale.tokens is None:
        first = next(batches)
        scale.start(first.layout.lengths)
        batches = itertools.chain([first], batches)

    compute = partial(compute_gradients, state, forward_step, functions.micro_batches, schedule=functions.schedule)
    logs = observer.compute(compute, batches)
    if previous is not None and settle(state, previous, observer) != "update":
        logs = observer.repeat(compute)  # `judge` may have overwritten these gradients; `discard` dropped their counts

    observer.enter("numbers")
    objective = functions.objective
    sums = sum((log["sums"] for log in logs), torch.zeros(len(objective.logged) + 1, device=local_device()))
    arguments, stop = (state.optimizer, state.groups, sums, len(objective.terms)), observer.stop_requested()
    numbers = StepNumbers(*arguments, stop=stop, limits=observer.limits(), run=functions.run_numbers)
    set_rates(state.optimizer, *functions.rates(state.step))
    step = Step(state.step + 1, forward_step, sums, numbers)
    if late:
        assert state.update.can_be_omitted
        observer.enter("update")
        state.update(numbers, step.number)
        state.step, step.is_pending = step.number, True
        observer.enter("end")
        return step

    step.action = _judge(state, step, observer)
    if step.action == "update":
        observer.enter("update")
        state.update(numbers, step.number)
    _end(state, step, observer)
    observer.enter("end")
    return step


def settle(state: ModelState, step: Step, observer: StepObserver) -> Action:
    """Read the numbers of a pending step, and handle a bad one. The device has already applied or omitted the update.

    If the observer raises an error, which it does for bad steps only, the step does not count.
    """
    step.is_pending, state.step = False, step.number - 1
    step.action = _judge(state, step, observer)
    # The device has decided by the same numbers and limits.
    assert step.numbers.host.is_good == (step.action == "update")
    _end(state, step, observer)
    return step.action


def _judge(state: ModelState, step: Step, observer: StepObserver) -> Action:
    """Read the numbers of a step, and decide on its update; the observer judges overflows that no scale can cure."""
    host, scale = step.numbers.host, state.loss_scale
    if scale is not None:
        step.overflowed = host.overflowed
        scale.settle(host.loss_scale, overflowed=host.overflowed and math.isfinite(host.loss))
        if scale.shrank:
            return "overflow"  # later steps have a lower scale
    return observer.judge(step)


def _end(state: ModelState, step: Step, observer: StepObserver) -> None:
    is_good = step.action == "update"
    if not is_good:
        observer.discard(step)
    if step.action != "rewind":
        state.update.end(step.number, is_good=is_good)
        state.step += 1


def compute_gradients(
    state: ModelState,
    forward_step: ForwardStep,
    micro_batches: int,
    batches: Iterator[PackedBatch],
    *,
    schedule: Schedule = forward_backward,
) -> Logs:
    """Set the gradients to zero, run all micro-batches forward and backward, and reduce the gradients over ranks."""
    for chunk in state.wrapped:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    return schedule(forward_step, batches, state.wrapped, micro_batches, state.groups)
