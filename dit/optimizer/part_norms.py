"""Gradient norms of the parts of a model, such as `layers.attention`: the same on any layout."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from dit.backends.device import local_device
from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import gather_objects
from dit.optimizer.master_weights import MasterShard
from dit.parallel.fsdp import local


def part_of(parameter: str) -> str:
    """Return the part that a parameter belongs to: its first module, or the module's name in a list of layers.

    `head.linear.weight` belongs to `head`, and `layers.3.attention.linear_qkv.weight` to `layers.attention`.
    """
    modules = parameter.split(".")[:-1] or [parameter]
    return f"{modules[0]}.{modules[2]}" if len(modules) > 2 and modules[1].isdigit() else modules[0]


class PartNorms:
    """Measures the gradient norm of each part; every rank creates it and calls it.

    Args:
        interval: steps between two measurements, each of which reads all gradients; 0 for none.

    Attributes:
        parts: names of all parts of the model, those of other pipeline stages included.
    """

    def __init__(self, optimizer: MegatronOptimizer, shards: Sequence[MasterShard], interval: int = 1) -> None:
        self._interval = interval
        self._norms: dict[str, float] = {}
        self.parts = sorted(set().union(*gather_objects({part_of(shard.name) for shard in shards})))
        self._factor, self._copies = optimizer.gradient_factor, optimizer.gradient_copies
        by_owner = {id(shard.owner): shard for shard in shards}
        # As in the norm of all gradients: each shard is counted on one rank per copy of the gradients.
        counted = [
            by_owner[id(owner)]
            for part in optimizer.parts_in_norm
            for owner in part.get_parameters()
            if param_is_not_shared(owner)
            and param_is_not_tensor_parallel_duplicate(owner, getattr(part, "tp_group", None))
        ]
        self._counted = [(shard, self.parts.index(part_of(shard.name))) for shard in counted]

    def measure(self, step: int) -> None:
        """Measure the gradients of a step before clipping, if it is due; between `StepNumbers` and the update."""
        if self._interval and step % self._interval == 0:
            norms = (self._squares() / self._copies).sqrt() * self._factor.value
            self._norms = {f"grad_norm/{part}": norm for part, norm in zip(self.parts, norms.tolist(), strict=True)}

    def take(self) -> dict[str, float]:
        """Return `grad_norm/PART` of the newest measurement, once; nothing if there was none since."""
        norms, self._norms = self._norms, {}
        return norms

    @torch.no_grad()
    def _squares(self) -> torch.Tensor:
        """Return the squared norm of each part over all ranks, before `gradient_factor` and `gradient_copies`."""
        gradients = [(local(shard.owner.grad), place) for shard, place in self._counted if shard.owner.grad is not None]
        squares = torch.zeros(len(self.parts), dtype=torch.float64, device=local_device())
        if gradients:
            norms = torch._foreach_norm([gradient for gradient, _ in gradients])
            places = torch.tensor([place for _, place in gradients], device=squares.device)
            squares.index_add_(0, places, torch.stack(list(norms)).double().square())
        dist.all_reduce(squares)
        return squares
