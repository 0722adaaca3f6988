"""Forward and backward passes through all pipeline stages, by Megatron-Core's schedules.

Every stage reads the same micro-batches, because it needs the conditions and the layout; counter-based noise is the
same on all stages. Only activations are sent, with their shapes, so packs may differ in length.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch

Logs = list[dict[str, Any]]
"""Logs of the loss function for each micro-batch; empty on pipeline stages before the last one."""
Schedule = Callable[[Any, Iterator[PackedBatch], Sequence[Any], int, ProcessGroups], Logs]
"""Runs all passes of a step, as `forward_backward` does."""


def forward_backward(
    forward_step: Callable[..., Any],
    batches: Iterator[PackedBatch],
    wrapped: Sequence[Any],
    num_micro_batches: int,
    groups: ProcessGroups,
) -> Logs:
    """Run one optimizer step's micro-batches forward and backward, and finish the gradients.

    Args:
        batches: this replica's micro-batches, the same on every stage.

    Returns:
        The logs of the loss function for each micro-batch, on the last stage; empty on the others.
    """
    config = wrapped[0].config
    run = get_forward_backward_func(groups.pp.size(), config.virtual_pipeline_model_parallel_size)
    return run(
        forward_step_func=forward_step,
        # Each chunk reads every micro-batch, some time after the previous chunk.
        data_iterator=list(itertools.tee(batches, len(wrapped))) if len(wrapped) > 1 else [batches],
        model=list(wrapped),
        num_microbatches=num_micro_batches,
        seq_length=1,  # sequence lengths vary and are sent with the activations
        micro_batch_size=1,
        p2p_communicator=P2PCommunicator(groups.pp, config),
        pg_collection=groups.collection,
    )
