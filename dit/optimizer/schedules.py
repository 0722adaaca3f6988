"""Learning rate over optimizer steps, as a pure function of the step: nothing to save, nothing to restore."""

import math

from dit.errors import ConfigError
from dit.settings import ScheduleConfig


def check_schedule(num_steps: int, peak_lr: float, config: ScheduleConfig) -> None:
    """Check that a schedule is possible before anything is built.

    Raises:
        ConfigError: a number lies outside its range, the lowest rate is above the peak, or `one_cycle` has no rise.
    """
    if config.kind not in ("constant", "cosine", "one_cycle"):
        raise ConfigError(f"schedule.kind={config.kind!r} is unknown; use constant, cosine or one_cycle")
    if num_steps < 1:
        raise ConfigError(f"training.num_steps={num_steps} leaves nothing to do; use at least 1")
    config.validate()
    if not (math.isfinite(peak_lr) and 0 <= config.min_lr <= peak_lr):
        raise ConfigError(
            f"schedule.min_lr={config.min_lr} must lie between 0 and the peak, optimizer.lr={peak_lr}; change one"
        )
    if config.kind == "one_cycle" and config.warmup_steps == 0:
        raise ConfigError(
            f"schedule.kind=one_cycle rises over warmup_steps, which is 0; use about {max(1, num_steps * 3 // 10)} "
            "(30 % of the run) or kind=cosine"
        )


def learning_rate(step: int, num_steps: int, peak_lr: float, config: ScheduleConfig) -> float:
    """Return the learning rate of one optimizer update.

    With n = step + 1 the number of the update, N the run and W = min(warmup_steps, N) the warm-up, so that a run
    shorter than `warmup_steps` rises all the way:

    * rise, n <= W: `peak_lr * n / W`, or `peak_lr * (1 - cos(pi * n / W)) / 2` for `one_cycle`. Update W has the peak;
      the first update already moves the weights.
    * after it: `constant` holds the peak; `cosine` and `one_cycle` fall as half a cosine from the peak at update
      max(W, 1) to `min_lr` at update N, and stay there for any later update.

    Args:
        step: optimizer updates already done, 0 for the first one.

    Raises:
        ConfigError: the schedule is impossible, or `step` is negative.

    Source: Loshchilov and Hutter 2016, arXiv:1608.03983, Eq. 5, without restarts; Smith and Topin 2017,
        arXiv:1708.07120, with cosine ramps.
    """
    check_schedule(num_steps, peak_lr, config)
    if step < 0:
        raise ConfigError(f"step={step}: the first update is step 0")
    update, warmup = step + 1, min(config.warmup_steps, num_steps)
    if update < warmup:
        part = update / warmup
        return peak_lr * (1 - math.cos(math.pi * part)) / 2 if config.kind == "one_cycle" else peak_lr * part
    summit = max(warmup, 1)
    if config.kind == "constant" or update <= summit:
        return peak_lr
    done = min(1.0, (update - summit) / (num_steps - summit)) if num_steps > summit else 1.0
    return config.min_lr + (peak_lr - config.min_lr) * (1 + math.cos(math.pi * done)) / 2
