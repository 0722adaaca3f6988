"""Judgement of a step by its loss and gradient norm: finite, no spike, and not too many bad steps."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Optional

from dit.optimizer.step_numbers import Limits

MIN_HISTORY = 16  # steps before a number can be a spike
HISTORY = 128  # steps in the running median
PERIOD = 100  # steps in which bad steps are counted
NORMAL = 1.4826  # standard deviations of a normal distribution in one median absolute deviation
FLOOR = 0.01  # smallest scale as a share of the median; otherwise, any change of a nearly constant number is a spike


def spike_limit(history: list[float], threshold: float) -> Optional[float]:
    """Return the largest number that is not a spike after `history`; None while the history is too short.

    The limit is `m + threshold * s`, where m is the median of the history and s its robust standard deviation, 1.4826
    times the median absolute deviation from m, and at least 1 % of |m|. Outliers in the history move neither.

    Source: the robust z-score of Iglewicz and Hoaglin 1993, "How to Detect and Handle Outliers".
    """
    if len(history) < MIN_HISTORY:
        return None
    middle = median(history)
    deviation = NORMAL * median(abs(value - middle) for value in history)
    return middle + threshold * max(deviation, FLOOR * abs(middle))


@dataclass(frozen=True)
class Bad:
    """Reason why a step makes no update.

    Attributes:
        kind: `not_finite` or `spike`.
        loss, grad_norm: numbers of the step, reduced over all ranks.
    """

    step: int
    kind: str
    loss: float
    grad_norm: float
    reason: str


class NumberGuard:
    """Judges each step by its loss and gradient norm, before its update.

    All ranks pass the same reduced numbers, so their decisions agree without communication. Only applied steps enter
    the history.

    Args:
        threshold: a number this many robust standard deviations above the median is a spike; None for no limit.
        max_bad: more than `max_bad` bad steps within `PERIOD` steps are too many.
    """

    def __init__(self, threshold: Optional[float], max_bad: int) -> None:
        self.threshold, self.max_bad = threshold, max_bad
        self._histories: dict[str, deque[float]] = {name: deque(maxlen=HISTORY) for name in ("loss", "grad_norm")}
        self.bad_steps: list[int] = []

    def limits(self) -> Limits:
        """Return the largest numbers of the next step that are no spikes."""
        if self.threshold is None:
            return Limits()
        limits = {name: spike_limit(list(history), self.threshold) for name, history in self._histories.items()}
        return Limits(**{name: limit for name, limit in limits.items() if limit is not None})

    def judge(self, step: int, loss: float, grad_norm: float) -> Optional[Bad]:
        """Return the reason against the update of a step; None if there is none, and its numbers enter the history."""
        numbers = {"loss": loss, "grad_norm": grad_norm}
        if not all(map(math.isfinite, numbers.values())):
            return Bad(step, "not_finite", loss, grad_norm, f"loss={loss}, grad_norm={grad_norm}")
        limits = self.limits()
        for name, value in numbers.items():
            limit, history = getattr(limits, name), self._histories[name]
            if value > limit:
                reason = (
                    f"{name}={value:.6g} is above {limit:.6g}, {self.threshold:g} robust standard deviations over the "
                    f"median {median(history):.6g} of {len(history)} steps"
                )
                return Bad(step, "spike", loss, grad_norm, reason)
        for name, value in numbers.items():
            self._histories[name].append(value)
        return None

    def clear_history(self) -> None:
        """Discard the numbers of earlier steps, because the loss changes."""
        for history in self._histories.values():
            history.clear()

    def note_bad(self, step: int) -> None:
        self.bad_steps = [earlier for earlier in self.bad_steps if earlier > step - PERIOD] + [step]

    def too_many(self) -> bool:
        return len(self.bad_steps) > self.max_bad

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON, for the metadata of a checkpoint; floats survive exactly."""
        histories = {name: [value.hex() for value in history] for name, history in self._histories.items()}
        return {**histories, "bad_steps": list(self.bad_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; an empty one is the state of a new run."""
        self.clear_history()
        for name, history in self._histories.items():
            history.extend(map(float.fromhex, state.get(name, ())))
        self.bad_steps = [int(step) for step in state.get("bad_steps", ())]
