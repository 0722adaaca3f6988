"""Moving averages of the weights, in fp32, sharded like the master weights.

A power-function average over t steps weighs the weights after step s by ((s / t)**n - ((s - 1) / t)**n), n > 1. Its
relative length sigma_rel is the standard deviation of s / t, so it remembers a share of the run instead of a number of
steps. A step without an update counts, with the weights before it, because s is the time of the run. Saved averages
of some lengths and steps determine those of other lengths: `combination`.

Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, section 3.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dit.backends.megatron_types import MegatronOptimizer
from dit.optimizer.master_weights import MasterShard, copy_masters_to_model


class EMA:
    """The average ema <- decay * ema + (1 - decay) * weights, updated after every update of the weights.

    Args:
        start_step: the average equals the weights up to this step.
        offload: whether the average is in host memory; an update then copies the weights there, one after another.
        sigma_rel: relative lengths of further, power-function averages, `powers`, each updated after every step.
    """

    def __init__(
        self,
        shards: list[MasterShard],
        decay: float,
        start_step: int = 0,
        *,
        offload: bool = False,
        sigma_rel: Sequence[float] = (),
    ) -> None:
        self.powers = [PowerAverage(shards, length, offload=offload) for length in sigma_rel]
        self.shards, self.decay, self.start_step, self.offload = shards, decay, start_step, offload
        device = torch.device("cpu") if offload else None
        self.values: list[Tensor] = [shard.main.detach().to(device, copy=True) for shard in shards]

    @property
    def by_slot(self) -> dict[str, list[Tensor]]:
        """The values of all averages, by their slot in a checkpoint."""
        return {"ema": self.values} | {power_slot(average.sigma_rel): average.values for average in self.powers}

    def weight(self, step: int) -> float:
        """Return the share of the new weights in the average after optimizer step `step`."""
        return 1.0 if step <= self.start_step else 1.0 - self.decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step `step` (counted from 1)."""
        mains, weight = [shard.main for shard in self.shards], self.weight(step)
        if not mains:  # a pipeline stage without trained weights
            return
        if weight == 1.0:
            torch._foreach_copy_(self.values, mains)
        elif self.offload:
            for value, main in zip(self.values, mains, strict=True):
                value.lerp_(main.to(value.device), weight)
        else:
            torch._foreach_lerp_(self.values, mains, weight)

    @contextmanager
    def applied(self, optimizer: MegatronOptimizer, wrapped: Sequence[Any]) -> Iterator[None]:
        """Use the averaged weights in this context; restores the training weights bitwise on exit.

        After an error, which may occur on one rank only, it restores the master weights and the average, but not the
        model: ranks gather its weights together, so the others would wait. The run must end.
        """
        self._swap()
        try:
            copy_masters_to_model(optimizer, wrapped)
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


class PowerAverage(EMA):
    """The power-function average of relative length `sigma_rel`; the average equals the weights after step 1."""

    def __init__(self, shards: list[MasterShard], sigma_rel: float, *, offload: bool = False) -> None:
        super().__init__(shards, 0.0, offload=offload)
        self.sigma_rel, self.exponent = sigma_rel, exponent_of(sigma_rel)

    def weight(self, step: int) -> float:
        return 1.0 - (1.0 - 1.0 / step) ** self.exponent


def power_slot(sigma_rel: float) -> str:
    """Return the slot of a power-function average in a checkpoint."""
    return f"ema_power_{sigma_rel}"


def exponent_of(sigma_rel: float) -> float:
    """Return n, where n s**(n - 1) on [0, 1] has the standard deviation `sigma_rel`, at most 1 / sqrt(12) for n = 1."""
    low, high = 1.0, 2.0 / sigma_rel
    for _ in range(80):
        n = (low + high) / 2
        low, high = (n, high) if math.sqrt(n / (n + 2)) / (n + 1) > sigma_rel else (low, n)
    return low


Profile = tuple[float, float]
"""Step of a power-function average, and its exponent."""


def combination(snapshots: Sequence[Profile], target: Profile) -> tuple[list[float], float]:
    """Return the weights of averages whose sum is closest to another average, and its error.

    Weights of the model over the run are unknown, so the sum has the closest profile: the least squares between the
    shares of each step. The error is the largest difference between the shares up to any step.
    """
    *gram, product = ([_product(a, b) for a in snapshots] for b in (*snapshots, target))
    gram_NN, product_N = (torch.tensor(x, dtype=torch.float64) for x in (gram, product))
    weights_N = torch.linalg.lstsq(gram_NN, product_N[:, None], driver="gelsd").solution[:, 0]
    steps_S = torch.linspace(0, max(t for t, _ in (*snapshots, target)), 1001, dtype=torch.float64)
    *combined, exact_S = ((steps_S / t).clamp(max=1) ** n for t, n in (*snapshots, target))
    return weights_N.tolist(), float((weights_N @ torch.stack(combined) - exact_S).abs().max())


def _product(a: Profile, b: Profile) -> float:
    """Return the integral of the product of two profiles n s**(n - 1) / t**n on [0, t]."""
    (t, n), (u, m) = a, b
    end = min(t, u)
    return n * m / (n + m - 1) * (end / t) ** (n - 1) * (end / u) ** (m - 1) * end / (t * u)
