"""Selection of the steps whose numbers the host reads one step late.

    host     queue step 1 | queue forward, backward of 2 | read numbers of 1 | queue numbers, update of 2
    device                  run step 1                     run forward, backward of 2, ...

The numbers are the loss, the gradient norm and the requests to stop. Until the host knows them, the device itself omits
the update of a bad step. A request to stop in a late step therefore ends the run one step later.
"""

from dit.checkpoint.train_state import TrainState
from dit.run_config import RunConfig
from dit.step.intervals import is_due


def may_be_late(config: RunConfig, state: TrainState, step: int) -> bool:
    """Return whether the numbers of step `step` may be read in the next one; equal on every rank.

    The numbers of all other steps are read at once:

        every step    with hooks; with `on_bad_numbers=rewind`, because the next batches depend on them; with averages
                      that are updated in host memory
        some steps    before a log line, a checkpoint, a validation or a grid of samples; before a step that
                      `recheck_interval` computes twice; before `loss_changes`, where the history of losses starts
                      again; at the end
    """
    training = config.training
    if training.hooks or training.on_bad_numbers == "rewind":
        return False
    intervals = (
        training.log_interval,
        config.checkpoint.interval,
        training.validation_interval,
        training.sample_interval,
    )
    last_steps = training.num_steps, training.stop_at_step, *config.loss_changes
    return (
        state.update.can_be_omitted
        and step not in last_steps
        and not any(is_due(step, interval) for interval in intervals)
        and not is_due(step + 1, training.recheck_interval)
    )
