"""The observer of a training run's steps: repeated computation, bad numbers, first steps, norms of parts, timer."""

from collections.abc import Callable, Iterator
from typing import Optional

from dit.backends.device import StepTimer
from dit.batch import PackedBatch
from dit.monitoring.heartbeat import Phase
from dit.monitoring.run_log import RunLog
from dit.optimizer.part_norms import PartNorms
from dit.optimizer.step_numbers import Limits
from dit.step.device_batches import DeviceBatches
from dit.step.schedule import Logs
from dit.step.train_step import Action, Compute, Part, Step, StepObserver
from dit.step_checks.bad_steps import BadSteps
from dit.step_checks.recheck import Recheck
from dit.step_checks.wiring import FirstSteps

Inputs = tuple[list[PackedBatch], list[str]]
"""Local micro-batches of a step, and the keys of their samples."""


class RunChecks(StepObserver):
    """Checks and timers of the steps of a run.

    Args:
        learning_rate: returns the learning rate of the update that follows a number of completed steps.
        timer: measures the time until the gradients are reduced.

    Attributes:
        asks_to_stop: returns whether this rank asks to stop after the current step; None for never.
    """

    first_steps: Optional[FirstSteps] = None
    asks_to_stop: Optional[Callable[[], bool]] = None

    def __init__(
        self,
        batches: DeviceBatches,
        recheck: Recheck,
        bad_steps: BadSteps,
        part_norms: PartNorms,
        learning_rate: Callable[[int], float],
        timer: StepTimer,
        phase: Phase,
        log: RunLog,
    ) -> None:
        self.batches, self.recheck, self.bad_steps, self.part_norms = batches, recheck, bad_steps, part_norms
        self.learning_rate, self.timer, self.phase, self.log = learning_rate, timer, phase, log
        self._num_keys = self._begun = 0
        self._previous: Inputs = [], []

    def enter(self, part: Part) -> None:
        if part == "forward and backward":
            self._previous, self._begun = self._inputs(), self.bad_steps.state.step + 1
            self._num_keys = len(self.batches.consumed.keys)
            self.batches.begin_step()
            self.bad_steps.begin_step()
            self.timer.start()
        elif part == "numbers":
            self.phase.enter("reduces the gradient")
        elif part == "update":
            self.phase.enter("updates")

    def _inputs(self) -> Inputs:
        return self.batches.step_batches.copy(), self.batches.consumed.keys[self._num_keys :]

    def compute(self, compute: Compute, batches: Iterator[PackedBatch]) -> Logs:
        return self.recheck.compute(compute, batches, self.batches, self.log)

    def stop_requested(self) -> bool:
        return self.asks_to_stop is not None and self.asks_to_stop()

    def limits(self) -> Limits:
        return self.bad_steps.guard.limits()

    def judge(self, step: Step) -> Action:
        inputs = self._inputs() if step.number == self._begun else self._previous
        action = self.bad_steps.judge(step, *inputs, self.log)
        if action == "update":
            if self.first_steps is not None:
                self.first_steps.check_gradients(step.number, self.learning_rate(step.number - 1), self.log)
            self.part_norms.measure(step.number)
        return action

    def discard(self, step: Step) -> None:
        self.bad_steps.drop_counts(1 + self._begun - step.number)

    def repeat(self, compute: Compute) -> Logs:
        self.bad_steps.mark_counts()
        return compute(self.batches.replay())
