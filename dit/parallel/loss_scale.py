"""The loss scale of fp16 training, one scaler of Megatron-Core for all optimizers of a run.

fp16 represents numbers from 6e-8 to 65504. Small gradients would underflow, so the loss is multiplied by a scale before
the backward pass, and the fp32 gradients are divided by it. If a gradient overflows, the update is skipped on all ranks
and the scale is halved; after enough updates without an overflow it is doubled.

The scale applies to the mean loss over the tokens of a micro-batch. The schedules use the sum over these tokens, so the
sum is multiplied by

    scale / tokens of the first pack of the run, or of `training.micro_batch_size` samples as long as the first one

with the tokens rounded up to a power of two. It is constant, because all micro-batches of a step must have the same
weight, and equal in every layout if the first sample is: for samples of one shape, or without `data.bucket_by_shape`
and with `data.num_streams`. Gradients are divided by the number of
tokens of the global batch in fp32.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler
from torch import Tensor

from dit.backends.megatron_types import MegatronOptimizer
from dit.parallel.fsdp import local
from dit.patches import patches

SCALE, TOKENS, OVERFLOWS = "loss_scale", "loss_scale_tokens", "overflowed_steps"
TRACKERS = ("growth_tracker", "hysteresis_tracker")


class LossScale:
    """The loss scale of all optimizers of a run.

    Megatron-Core builds a scaler for each optimizer of a chain (dense and expert parameters), and each tracks the
    overflows of its own gradients, so the scales would diverge. Here all optimizers use this object, which adapts one
    scale once per step to the overflows of all optimizers and ranks. The scale and its trackers are on the device, so
    the host need not wait for the gradients of a step, and a CUDA graph can repeat the step.

    Args:
        micro_batch_size: `training.micro_batch_size`; a replica may run smaller micro-batches.

    Attributes:
        found_inf: 1 if a gradient of this rank overflowed since the last `adapt`, else 0, `[1]`, float32.
        value: scale of the mean loss, on the host, after the latest step that was settled.
        tokens: divisor of the scale; None until `start` or `load`.
        overflowed_steps: number of steps without an update, because a gradient overflowed.
        shrank: whether the latest settled step lowered the scale.
    """

    def __init__(self, scaler: MegatronGradScaler, micro_batch_size: int) -> None:
        self._scaler, self._micro_batch_size = scaler, micro_batch_size
        self.found_inf, self.value = torch.zeros_like(scaler.scale), float(scaler.scale.item())
        self._trackers: Optional[Tensor] = None  # in the order of TRACKERS; None for a constant scale
        if isinstance(scaler, DynamicGradScaler):
            self._trackers = torch.tensor([0, scaler.hysteresis], device=scaler.scale.device)
        self.tokens: Optional[int] = None
        self.overflowed_steps = 0
        self.shrank = False

    def start(self, lengths: Sequence[int]) -> None:
        """Set the divisor of a new run, before the first step (collective).

        Args:
            lengths: tokens of each sample of the first micro-batch. Those of rank 0 are used, which has the first pack
                or sample of the run.
        """
        size = self._micro_batch_size
        rank_0_tokens = [sum(lengths) if size == 1 else size * lengths[0]]
        dist.broadcast_object_list(rank_0_tokens, src=0)
        self.tokens = 1 << (rank_0_tokens[0] - 1).bit_length()

    def __call__(self, loss_sum: Tensor) -> Tensor:
        """Return the scaled loss; Megatron-Core's schedules call this before the backward pass."""
        return loss_sum * self.scale

    @property
    def scale(self) -> Tensor:
        """Factor of the loss summed over tokens, `[1]`, float32."""
        return self._scaler.scale / (self.tokens or 1)

    @property
    def inv_scale(self) -> Tensor:
        """Factor of the gradients in Megatron-Core's optimizers, `[1]`, float32."""
        return self._scaler.inv_scale * (self.tokens or 1)

    def update(self, found_inf: bool) -> None:
        """Do nothing; Megatron-Core calls this before the overflows of other optimizers and ranks are known."""

    def adapt(self, overflowed: Tensor, is_finite: Tensor) -> Tensor:
        """Adapt the scale to the gradients of a step, once per step, on the device; return it, `[1]`, float32.

        Args:
            overflowed: whether a gradient overflowed on any rank, `[]`.
            is_finite: whether the loss is finite, `[]`. If not, the scale does not change, because the gradients do not
                depend on it.

        Source: Megatron-Core's `DynamicGradScaler.update`, which decides on the host.
        """
        self.found_inf.zero_()
        scaler, scale = self._scaler, self._scaler.scale
        if self._trackers is not None:
            growth, hysteresis = self._trackers.unbind()
            grows, left = growth + 1 >= scaler.growth_interval, hysteresis - 1
            lower = torch.where(left <= 0, torch.maximum(scale * scaler.backoff_factor, scaler.min_scale), scale)
            higher = torch.where(grows, scale * scaler.growth_factor, scale)
            next_growth = torch.where(overflowed | grows, 0, growth + 1)
            next_hysteresis = torch.where(overflowed, left, torch.where(grows, scaler.hysteresis, hysteresis))
            trackers = torch.stack([next_growth, next_hysteresis])
            scale.copy_(torch.where(is_finite, torch.where(overflowed, lower, higher), scale))
            self._trackers.copy_(torch.where(is_finite, trackers, self._trackers))
        return scale

    def settle(self, value: float, *, overflowed: bool) -> None:
        """Note the scale after a step, which the host has read, and whether gradients of a finite loss overflowed."""
        self.shrank = overflowed and value < self.value
        self.overflowed_steps += overflowed
        self.value = value

    def exhausted(self) -> str:
        """Return the reason why an overflow did not lower the scale, and the cure."""
        return (
            f"with a loss scale of {self.value:g}, the smallest possible (lower training.loss_scale if it is set, or "
            "train with training.precision=bf16)"
        )

    def scalars(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        trackers = {} if self._trackers is None else dict(zip(TRACKERS, self._trackers.tolist()))
        tokens = {} if self.tokens is None else {TOKENS: self.tokens}
        return {SCALE: self.value, OVERFLOWS: self.overflowed_steps, **tokens, **trackers}

    def load(self, scalars: Mapping[str, float]) -> None:
        """Restore the result of `scalars`; ignore states of other precisions, and keep a constant scale."""
        self.overflowed_steps = int(scalars.get(OVERFLOWS, 0))
        if TOKENS in scalars:
            self.tokens = int(scalars[TOKENS])
        if self._trackers is not None and SCALE in scalars and all(name in scalars for name in TRACKERS):
            self.value = self._scaler.scale.fill_(scalars[SCALE]).item()
            self._trackers.copy_(torch.tensor([int(scalars[name]) for name in TRACKERS]))


def sub_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers in Megatron-Core's chain (dense and expert parameters have one each)."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@patches(
    "megatron-core 0.16",
    "core/optimizer/optimizer.py: grad_scaler, _unscale_main_grads_and_check_for_nan",
    why="each optimizer would wait for its gradients and adapt its own scale, and torch cannot unscale DTensors",
)
def share_loss_scale(optimizer: MegatronOptimizer, wrapped: Sequence[Any], micro_batch_size: int) -> None:
    """Make the optimizers of a chain use one loss scale, and the schedules multiply the loss by it."""
    parts = sub_optimizers(optimizer)
    shared = LossScale(parts[0].grad_scaler, micro_batch_size)
    for part in parts:
        part.grad_scaler = shared
        part._unscale_main_grads_and_check_for_nan = partial(_unscale, part, shared)
    for chunk in wrapped:
        chunk.config.grad_scale_func = shared


def _unscale(optimizer: MegatronOptimizer, scale: LossScale) -> bool:
    """Divide the gradients of the master weights by the scale, and note an overflow on the device; return False."""
    gradients = [local(p.grad) for p in optimizer.get_parameters() if p.grad is not None]
    if gradients:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, scale.found_inf, scale.inv_scale)
    return False


def loss_scale_of(optimizer: MegatronOptimizer) -> Optional[LossScale]:
    """Return the loss scale of a run, or None if the run does not train in fp16."""
    scale = getattr(sub_optimizers(optimizer)[0], "grad_scaler", None)
    return scale if isinstance(scale, LossScale) else None
