"""Run micro-batches through all pipeline stages: training steps on Megatron-Core's schedules, and plain predictions.

Every stage reads the same micro-batches: the conditions and the layout are needed on each, and noise by address makes
the same draws everywhere. Only activations travel, with their shapes, so packs may differ in length.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.models.base import Backbone


def forward_backward(
    forward_step: Callable[..., Any],
    batches: Iterator[PackedBatch],
    wrapped: Sequence[Any],
    num_micro_batches: int,
    groups: ProcessGroups,
) -> list[dict[str, Any]]:
    """Run one optimizer step's micro-batches forward and backward, and finish the gradients.

    Args:
        forward_step: as Megatron-Core's schedules call it.
        batches: this replica's micro-batches, the same on every stage.
        wrapped: this rank's model chunks in their data-parallel wrappers.

    Returns:
        What the loss function reported for each micro-batch, on the last stage; empty on the others.
    """
    config = wrapped[0].config
    run = get_forward_backward_func(groups.pp.size(), config.virtual_pipeline_model_parallel_size)
    return run(
        forward_step_func=forward_step,
        # Each chunk asks for every micro-batch, some time after the chunk before it.
        data_iterator=list(itertools.tee(batches, len(wrapped))) if len(wrapped) > 1 else [batches],
        model=list(wrapped),
        num_microbatches=num_micro_batches,
        seq_length=1,  # sequence lengths vary and travel with the activations
        micro_batch_size=1,
        p2p_communicator=P2PCommunicator(groups.pp, config),
        pg_collection=groups.collection,
    )


class WholeNetwork:
    """The whole model as one function, whatever stages it lies on: for sampling and held-out losses.

    All ranks of a pipeline must call it with the same inputs, and all get the prediction, to the bit, so that solvers
    take the same steps everywhere. One micro-batch is under way at a time.

    Args:
        networks: this rank's model chunks, in their data-parallel wrappers where they have any: under FSDP a bare
            chunk holds no whole weights.
    """

    def __init__(self, networks: Sequence[nn.Module], groups: ProcessGroups) -> None:
        self.networks, self.group = list(networks), groups.pp
        self.chunks: list[Backbone] = [get_attr_wrapped_model(n, "stage", return_model_obj=True) for n in networks]
        self._neighbours = P2PCommunicator(groups.pp, self.chunks[0].config)

    @torch.no_grad()
    def __call__(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        """Predict as `Backbone.forward` does on one rank; float32 when stages share the model."""
        if self.group.size() == 1:
            return self.networks[0](inputs_TC, time_S, batch)
        out: Optional[Tensor] = None
        for network, chunk in zip(self.networks, self.chunks, strict=True):
            # The shape asked for is a placeholder: the sender tells the real one.
            chunk.set_input_tensor(self._neighbours.recv_forward((1, 1, 1), chunk.stage.first))
            out = network(inputs_TC, time_S, batch)
            chunk.set_input_tensor(None)
            self._neighbours.send_forward(out, chunk.stage.last)
        predicted = None if out is None or not self.chunks[-1].stage.last else out.float()
        return self._share(predicted, inputs_TC.device)

    def _share(self, prediction: Optional[Tensor], device: torch.device) -> Tensor:
        """Give the last stage's prediction to every stage."""
        last = self.group.size() - 1
        shape = torch.tensor([0, 0] if prediction is None else prediction.shape, device=device)
        dist.broadcast(shape, group=self.group, group_src=last)
        if prediction is None:
            prediction = torch.empty(tuple(shape.tolist()), device=device)
        dist.broadcast(prediction, group=self.group, group_src=last)
        return prediction
