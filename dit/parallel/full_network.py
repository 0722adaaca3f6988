"""The full model as one function under every pipeline layout, for sampling and validation losses."""

from collections.abc import Sequence
from typing import Optional

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.models.base import Backbone


class FullNetwork:
    """The full model as one function under every pipeline layout, for sampling and validation losses.

    All ranks of a pipeline must call it with the same inputs. They get bitwise equal predictions, so that solvers take
    the same steps on every rank. One micro-batch is in flight at a time.

    Args:
        networks: this rank's model chunks, in their data-parallel wrappers, if any; under FSDP an unwrapped chunk does
            not have the unsharded weights.
    """

    def __init__(self, networks: Sequence[nn.Module], groups: ProcessGroups) -> None:
        self.networks, self.group = list(networks), groups.pp
        self.chunks: list[Backbone] = [get_attr_wrapped_model(n, "stage", return_model_obj=True) for n in networks]
        self._neighbours = P2PCommunicator(groups.pp, self.chunks[0].config)

    @torch.no_grad()
    def __call__(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        """Return the result of `Backbone.forward` on one rank; float32 if there are several stages."""
        if self.group.size() == 1:
            return self.networks[0](inputs_TC, time_S, batch)
        out: Optional[Tensor] = None
        for network, chunk in zip(self.networks, self.chunks, strict=True):
            # The shape is a placeholder; the sender sends the actual shape.
            chunk.set_input_tensor(self._neighbours.recv_forward((1, 1, 1), chunk.stage.first))
            out = network(inputs_TC, time_S, batch)
            chunk.set_input_tensor(None)
            self._neighbours.send_forward(out, chunk.stage.last)
        prediction = None if out is None or not self.chunks[-1].stage.last else out.float()
        return self._broadcast(prediction, inputs_TC.device)

    def _broadcast(self, prediction: Optional[Tensor], device: torch.device) -> Tensor:
        """Broadcast the last stage's prediction to all stages."""
        last = self.group.size() - 1
        shape = torch.tensor([0, 0] if prediction is None else prediction.shape, device=device)
        dist.broadcast(shape, group=self.group, group_src=last)
        if prediction is None:
            prediction = torch.empty(tuple(shape.tolist()), device=device)
        dist.broadcast(prediction, group=self.group, group_src=last)
        return prediction
