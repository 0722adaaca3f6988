"""Exponential moving average of the weights, in fp32, sharded like the master weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dit.backends.megatron_types import MegatronOptimizer
from dit.optimizer.master_weights import MasterShard, copy_masters_to_model


class EMA:
    """The average ema <- decay * ema + (1 - decay) * weights, updated after optimizer steps.

    Args:
        shards: this rank's master shards.
        decay: decay per update.
        start_step: the average equals the weights up to this step.
        offload: whether the average is in host memory; an update then copies the weights there, one after another.
    """

    def __init__(self, shards: list[MasterShard], decay: float, start_step: int = 0, *, offload: bool = False) -> None:
        self.decay, self.start_step, self.offload = decay, start_step, offload
        self.shards = shards
        device = torch.device("cpu") if offload else None
        self.values: list[Tensor] = [shard.main.detach().to(device, copy=True) for shard in shards]

    def weight(self, step: int) -> float:
        """Return the share of the new weights in the average after optimizer step `step`."""
        return 1.0 if step <= self.start_step else 1.0 - self.decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step `step` (counted from 1)."""
        mains, weight = [shard.main for shard in self.shards], self.weight(step)
        if weight == 1.0:
            torch._foreach_copy_(self.values, mains)
        elif self.offload:
            for value, main in zip(self.values, mains, strict=True):
                value.lerp_(main.to(value.device), weight)
        else:
            torch._foreach_lerp_(self.values, mains, weight)

    @contextmanager
    def applied(self, optimizer: MegatronOptimizer, wrapped: Sequence[Any]) -> Iterator[None]:
        """Use the averaged weights in this context; restores the training weights bitwise on exit."""
        self._swap()
        copy_masters_to_model(optimizer, wrapped)
        try:
            yield
        finally:
            self._swap()
            copy_masters_to_model(optimizer, wrapped)

    @torch.no_grad()
    def _swap(self) -> None:
        for shard, value in zip(self.shards, self.values):
            weights = shard.main.clone()
            shard.main.copy_(value)
            value.copy_(weights)
