"""The loss scale of fp16 training: Megatron-Core's scaler, one for all optimizers of a run.

fp16 has numbers from 6e-8 to 65504. Gradients of small activations would vanish, so the loss is multiplied by a scale
before the backward pass, and the fp32 gradients are divided by it. Where a gradient overflows, the update is skipped on
all ranks and the scale is halved; after enough updates without an overflow it is doubled.

The scale is that of the mean loss over the tokens of a micro-batch. The schedules take the sum over these tokens, so
the sum is multiplied by

    scale / tokens of the first micro-batch of the run, rounded up to a power of two

a constant, because micro-batches of a step must weigh the same. Gradients are divided by the number of tokens of the
global batch in fp32.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from torch import Tensor

from dit.backends.megatron_types import MegatronOptimizer
from dit.backends.process_groups import any_rank
from dit.parallel.fsdp import local

SCALE, TOKENS, OVERFLOWS = "loss_scale", "loss_scale_tokens", "overflowed_steps"
TRACKERS = ("growth_tracker", "hysteresis_tracker")


class LossScale:
    """The loss scale that all optimizers of a run share.

    Megatron-Core builds a scaler for each optimizer of a chain (dense and expert parameters have one each), and each
    follows the overflows of its own gradients: the scales would drift apart. Here they all see this object, and it
    asks one scaler, once a step, with the overflows of all optimizers and ranks.

    Args:
        scaler: Megatron-Core's, dynamic or constant.

    Attributes:
        tokens: divisor of the scale; None until `start` or `load`.
        overflowed_steps: steps without an update so far, since a gradient overflowed.
        shrank: whether the newest step lowered the scale.
    """

    def __init__(self, scaler: MegatronGradScaler) -> None:
        self._scaler = scaler
        self._found = False
        self.tokens: Optional[int] = None
        self.overflowed_steps = 0
        self.shrank = False

    def start(self, tokens: int) -> None:
        """Set the divisor of a new run; every rank calls this before the first step.

        Args:
            tokens: real tokens of the first micro-batch. Those of rank 0 count, which are the same in every layout.
        """
        of_rank_0 = [tokens]
        dist.broadcast_object_list(of_rank_0, src=0)
        self.tokens = 1 << (of_rank_0[0] - 1).bit_length()

    def __call__(self, loss_sum: Tensor) -> Tensor:
        """Return the scaled loss; Megatron-Core's schedules call this before the backward pass."""
        return loss_sum * self.scale

    @property
    def scale(self) -> Tensor:
        """Factor of the loss summed over tokens, `[1]`, float32."""
        return self._scaler.scale / (self.tokens or 1)

    @property
    def inv_scale(self) -> Tensor:
        """`[1]`, float32: Megatron-Core's optimizers multiply the gradients by it."""
        return self._scaler.inv_scale * (self.tokens or 1)

    @property
    def value(self) -> float:
        """The scale of the mean loss, on the host."""
        return float(self._scaler.scale.item())

    def update(self, found_inf: bool) -> None:
        """Note whether the gradients of one optimizer have overflowed; its `prepare_grads` calls this."""
        self._found |= found_inf

    def settle(self, *, adapt: bool = True) -> bool:
        """Adapt the scale to this step's gradients; every rank calls this once a step, after `gradient_norm`.

        Args:
            adapt: False only forgets what was found: the gradients of a loss that is not finite say nothing of the
                scale. The same on every rank.

        Returns:
            Whether the update must be skipped, on every rank the same: a gradient overflowed on one of them.
        """
        found = any_rank(self._found)
        if not adapt:
            self._found = self.shrank = False
            return found
        before = self.value if found else 0.0
        self._scaler.update(found)
        self._found, self.shrank = False, found and self.value < before
        self.overflowed_steps += found
        return found

    def exhausted(self) -> str:
        """Say why an overflow did not lower the scale, and the cure."""
        return (
            f"with a loss scale of {self.value:g}, the smallest that the settings allow (lower training.min_loss_scale "
            "or training.loss_scale, or train with training.precision=bf16)"
        )

    def scalars(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        state = self._scaler.state_dict()
        trackers = {name: state[name] for name in TRACKERS if name in state}
        tokens = {} if self.tokens is None else {TOKENS: self.tokens}
        return {SCALE: self.value, OVERFLOWS: self.overflowed_steps, **tokens, **trackers}

    def load(self, scalars: Mapping[str, float]) -> None:
        """Restore the result of `scalars`; a state of another precision has none of it, and a constant scale stays."""
        self.overflowed_steps = int(scalars.get(OVERFLOWS, 0))
        if SCALE in scalars:
            self.tokens = int(scalars.get(TOKENS, 1))  # earlier versions scaled the sum
        if SCALE in scalars and all(name in scalars for name in TRACKERS):
            scale = torch.full_like(self._scaler.scale, scalars[SCALE])
            self._scaler.load_state_dict({"scale": scale, **{name: int(scalars[name]) for name in TRACKERS}})


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def share_loss_scale(optimizer: MegatronOptimizer, wrapped: Sequence[Any]) -> None:
    """Let the optimizers of a chain share one loss scale, and the schedules multiply the loss by it.

    Args:
        wrapped: the model's chunks in their data-parallel wrappers.
    """
    parts = _parts(optimizer)
    shared = LossScale(parts[0].grad_scaler)
    for part in parts:
        part.grad_scaler = shared
        part._collect_main_grad_data_for_unscaling = partial(_local_gradients, part)
    for chunk in wrapped:
        chunk.config.grad_scale_func = shared


def _local_gradients(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the master weights' gradients on this rank; torch's unscaling takes no DTensors."""
    return [local(p.grad) for p in optimizer.get_parameters() if p.grad is not None]


def loss_scale_of(optimizer: MegatronOptimizer) -> Optional[LossScale]:
    """Return the loss scale of a run; None unless it trains in fp16."""
    scale = getattr(_parts(optimizer)[0], "grad_scaler", None)
    return scale if isinstance(scale, LossScale) else None
