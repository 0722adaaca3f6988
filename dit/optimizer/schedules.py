"""Learning rate as a pure function of the optimizer step, so that it has no state to save.

A schedule is a class with flat settings; a recipe names one, or defines its own. Updates are counted
from 1, so that the learning rate of the first update is not 0.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from dit.errors import ConfigError
from dit.ranges import COUNT, COUNT_OR_ZERO, NOT_NEGATIVE, check_ranges, ranged

Decay = Literal["linear", "one_minus_sqrt"]


@dataclass(kw_only=True)
class Schedule(ABC):
    """The learning rate of every update of a run, and optionally the momentum."""

    @abstractmethod
    def rate(self, update: int, num_steps: int, peak: float) -> float:
        """Return the rate of an update, counted from 1, constant after `num_steps`; `peak` is `optimizer.lr`."""

    def momentum(self, update: int, num_steps: int, beta1: float) -> float:
        """Return Adam's beta1 for an update: `optimizer.beta1` unless the schedule changes it."""
        return beta1

    def check(self, peak: float) -> None:
        """Check the settings, before anything is built."""
        check_ranges("schedule", self)

    def adapted(self, num_steps: int) -> list[str]:
        """Describe the settings that were adapted to the length of the run, one line each."""
        return []


@dataclass(kw_only=True)
class WarmUp(Schedule):
    """A linear warm-up to the peak; the subclass defines what follows.

    Update n of the warm-up has `peak * n / warmup_steps`; its last one has the peak.

    Attributes:
        warmup_steps: updates until the peak.
    """

    warmup_steps: int = ranged(0, COUNT_OR_ZERO)

    def adapted(self, num_steps: int) -> list[str]:
        if self.warmup_steps <= num_steps:
            return []
        return [f"schedule.warmup_steps={self.warmup_steps} is too long: the rate rises for {num_steps} steps"]

    def rate(self, update: int, num_steps: int, peak: float) -> float:
        warmup = min(self.warmup_steps, num_steps)
        if update < warmup:
            return peak * (update / warmup)
        summit = max(warmup, 1)
        return peak if update <= summit else self.after(update, summit, num_steps, peak)

    @abstractmethod
    def after(self, update: int, summit: int, num_steps: int, peak: float) -> float:
        """Return the rate of an update after update `summit`, which has the peak."""


@dataclass(kw_only=True)
class Constant(WarmUp):
    """The peak, constant after the warm-up."""

    def after(self, update: int, summit: int, num_steps: int, peak: float) -> float:
        return peak


@dataclass(kw_only=True)
class Falling(WarmUp):
    """A decay from the peak to `min_lr`, reached at the last update of the run.

    Attributes:
        min_lr: lowest rate after the peak.
    """

    min_lr: float = ranged(0.0, NOT_NEGATIVE)

    def check(self, peak: float) -> None:
        super().check(peak)
        if self.min_lr > peak:
            raise ConfigError(
                f"schedule.min_lr={self.min_lr} must be between 0 and the peak, optimizer.lr={peak}; change one"
            )

    def after(self, update: int, summit: int, num_steps: int, peak: float) -> float:
        start = self.fall_start(summit, num_steps)
        if update <= start:
            return peak
        progress = min(1.0, (update - start) / (num_steps - start)) if num_steps > start else 1.0
        return self.fall(progress, peak)

    def fall_start(self, summit: int, num_steps: int) -> int:
        """Return the last update with the peak."""
        return summit

    @abstractmethod
    def fall(self, progress: float, peak: float) -> float:
        """Return the rate after this part of the fall, in (0, 1]."""


@dataclass(kw_only=True)
class Cosine(Falling):
    """After the warm-up, half a cosine down to `min_lr`.

    Source: Loshchilov and Hutter 2016, arXiv:1608.03983, Eq. 5, without restarts.
    """

    def fall(self, progress: float, peak: float) -> float:
        return _between(peak, self.min_lr, progress)


@dataclass(kw_only=True)
class Linear(Falling):
    """After the warm-up, a straight line down to `min_lr`."""

    def fall(self, progress: float, peak: float) -> float:
        return peak + (self.min_lr - peak) * progress


@dataclass(kw_only=True)
class WSD(Linear):
    """Warm-up, stable, decay: a constant peak, then a decay to `min_lr` over the last `decay_steps` updates.

    A run can be extended from any checkpoint of the stable part. In a run shorter than warm-up and decay, the decay
    starts at the end of the warm-up.

    Attributes:
        decay_steps: updates of the decay.
        decay: shape of the decay: linear, or `1 - sqrt` of the completed fraction.

    Source: Hu et al. 2024 (MiniCPM), arXiv:2404.06395, section 4.1; both shapes, Haegele et al. 2024, arXiv:2405.18392,
    Eq. 1 and 2.
    """

    decay_steps: int = ranged(1000, COUNT)
    decay: Decay = "linear"

    def adapted(self, num_steps: int) -> list[str]:
        room = num_steps - max(min(self.warmup_steps, num_steps), 1)
        lines = super().adapted(num_steps)
        if self.decay_steps > room:
            lines.append(f"schedule.decay_steps={self.decay_steps} is too long: the rate falls for {room} steps")
        return lines

    def fall_start(self, summit: int, num_steps: int) -> int:
        return max(summit, num_steps - self.decay_steps)

    def fall(self, progress: float, peak: float) -> float:
        return super().fall(math.sqrt(progress) if self.decay == "one_minus_sqrt" else progress, peak)


@dataclass(kw_only=True)
class InverseSqrt(WarmUp):
    """Fall as `peak / sqrt(max(n / reference_steps, 1))`, times the linear rise of the warm-up.

    After the warm-up the rate does not depend on the length of the run.

    Attributes:
        reference_steps: updates until the decay.

    Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, learning rate decay, with their linear ramp-up.
    """

    reference_steps: int = ranged(70_000, COUNT)

    def rate(self, update: int, num_steps: int, peak: float) -> float:
        # Warm-up and decay may overlap, so they are multiplied.
        warmup = max(min(self.warmup_steps, num_steps), 1)
        return self.after(update, warmup, num_steps, peak) * min(update / warmup, 1.0)

    def after(self, update: int, summit: int, num_steps: int, peak: float) -> float:
        return peak / math.sqrt(max(update / self.reference_steps, 1.0))


@dataclass(kw_only=True)
class TorchOneCycle(Schedule):
    """The one-cycle policy as in `torch.optim.lr_scheduler.OneCycleLR`, over all updates of the run.

    The rate rises as half a cosine from `peak / div_factor` to the peak, at update `pct_start * num_steps`, and falls
    as one to `peak / div_factor / final_div_factor`. Adam's beta1 falls from 0.95 to 0.85 at the peak, and rises again.
    The constants are torch's defaults; for others, set them in a subclass.

    Source: torch.optim.lr_scheduler.OneCycleLR; Smith and Topin 2017, arXiv:1708.07120.
    """

    pct_start: ClassVar[float] = 0.3
    div_factor: ClassVar[float] = 25.0
    final_div_factor: ClassVar[float] = 1e4
    max_momentum: ClassVar[float] = 0.95
    base_momentum: ClassVar[float] = 0.85

    def rate(self, update: int, num_steps: int, peak: float) -> float:
        first = peak / self.div_factor
        return self._cycle(update, num_steps, first, peak, first / self.final_div_factor)

    def momentum(self, update: int, num_steps: int, beta1: float) -> float:
        return self._cycle(update, num_steps, self.max_momentum, self.base_momentum, self.max_momentum)

    def _cycle(self, update: int, num_steps: int, start: float, middle: float, end: float) -> float:
        update, summit = min(update, num_steps), self.pct_start * num_steps  # not rounded, as in torch
        if update <= summit:
            return _between(start, middle, (update - 1) / (summit - 1) if summit > 1 else 1.0)
        return _between(middle, end, (update - summit) / (num_steps - summit))


def _between(start: float, end: float, part: float) -> float:
    """Return the value after a part of half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2
