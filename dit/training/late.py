"""Selection of the steps whose numbers the host reads one step late.

    step 1    forward, backward | numbers | update          the host only queues work
    step 2    forward, backward |                           queued; then the host reads the numbers of step 1
              numbers | update

The numbers are the loss, the gradient norm and the requests to stop. Until the host knows them, the device itself omits
the update of a bad step. A request to stop therefore ends a run one step later.
"""

from dit.checkpoint.train_state import TrainState
from dit.run_config import RunConfig
from dit.step.intervals import is_due


def may_be_late(config: RunConfig, state: TrainState, step: int) -> bool:
    """Return whether the numbers of step `step` may be read in the next one; equal on every rank.

    Others are read at once, because something that follows the step needs them:

        every step       fp16, whose loss scale depends on the gradients; hooks; `on_bad_numbers=rewind`, which must not
                         read further data; weights, moments or averages that are updated in host memory
        some steps       before a log line, a checkpoint, a validation, a grid of samples, a step that is computed
                         twice, new terms of the loss, and the end
    """
    training = config.training
    if state.loss_scale is not None or training.hooks or training.on_bad_numbers == "rewind":
        return False
    intervals = (
        training.log_interval,
        config.checkpoint.interval,
        training.validation_interval,
        training.sample_interval,
    )
    ends = training.num_steps, training.stop_at_step, config.objective.auxiliary.start_step
    return (
        state.update.can_be_omitted
        and step not in ends
        and not any(is_due(step, interval) for interval in intervals)
        and not is_due(step + 1, training.recheck_interval)
    )
