"""Batched accumulation, scaling and sharing of gradients; Megatron-Core handles one parameter at a time."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn
from torch.autograd import Variable

from dit.kernels.adamw import AddGradients
from dit.patches import patches

PENDING_BYTES = 64 << 20
"""Size of pending gradients at which they are added to the main gradients before the backward pass ends."""


class GradientFactor:
    """Factor that the optimizer update still has to apply to the gradients: 1 / tokens of the global batch.

    Megatron-Core scales all main gradients in a separate pass on every rank. Here the update applies this factor and
    the clipping factor together, and only to the gradients of the weights that the rank updates.

    Attributes:
        value: the factor, `[]`, float64; 1 until the tokens of the first step are counted.
    """

    def __init__(self) -> None:
        self.value = torch.ones((), dtype=torch.float64)


def finalize_gradients(
    wrapped: Sequence[Any],
    num_tokens: Optional[Tensor],
    pg_collection: Any,
    force_all_reduce: Optional[bool] = False,
) -> None:
    """Reduce the gradients of a step; `StepNumbers` counts its tokens.

    Args:
        num_tokens: unused.
    """
    finalize_model_grads(wrapped, None, pg_collection, force_all_reduce)


class _Pending:
    """Gradients of a backward pass that are not yet added to the main gradients, and their size in bytes."""

    def __init__(self) -> None:
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.bytes = 0

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        self.gradients.append((param, grad))
        self.bytes += grad.nbytes

    def take(self) -> list[tuple[nn.Parameter, Tensor]]:
        gradients, self.gradients, self.bytes = self.gradients, [], 0
        return gradients


class DataParallel(DistributedDataParallel):
    """Megatron-Core's data parallelism with batched accumulation into the fp32 main gradients.

    Megatron-Core's hook makes one call per parameter and micro-batch. Here gradients are collected until they have
    64 MiB or the backward pass ends:

        backward  g9 g8 g7 | g6 g5 g4 | g3 g2 g1 |
        calls              add        add        add; overlapped reductions may start at each of them

    Megatron-Core sets all main gradients to zero before a step. Here the first gradient of a step overwrites the main
    gradient of the previous step, which saves one write and one read. Main gradients of parameters without a gradient
    are set to zero before the reduction; until then they are stale.

    Megatron-Core can also let the product that computes a gradient add it (`gradient_accumulation_fusion`). That needs
    Apex's CUDA extension `fused_weight_gradient_mlp_cuda`, and main gradients that are zero before a step.

    Args:
        add: adds gradients to main gradients; `dit.kernels.fused.gradients.add_gradients` takes one kernel for all.
    """

    def __init__(self, *args: Any, add: AddGradients = torch._foreach_add_, **kwargs: Any) -> None:
        self._pending, self._add = _Pending(), add
        self._stale: set[nn.Parameter] = set()  # parameters whose main gradients are of the previous step
        super().__init__(*args, **kwargs)
        assert not self.config.gradient_accumulation_fusion  # linears would add to stale main gradients

    @patches(
        "megatron-core 0.16",
        "core/distributed/distributed_data_parallel.py: _make_backward_post_hook, zero_grad_buffer",
        why="it handles one parameter at a time",
    )
    def _make_backward_post_hook(self, param: nn.Parameter) -> Callable[..., None]:
        add_pending, pending = self._add_pending, self._pending

        def hook(*_: object) -> None:
            if param.grad is None:
                self.zero_stale([param])
                self._reduce_if_overlapped([param])
                return
            if not pending.gradients:
                Variable._execution_engine.queue_callback(add_pending)
            pending.add(param, param.grad)
            param.grad = None
            if pending.bytes >= PENDING_BYTES:
                add_pending()

        return hook

    def zero_grad_buffer(self) -> None:
        """Begin a step: mark all main gradients as stale, and drop pending gradients of a failed pass."""
        self._pending.take()
        self._stale.update(self.params_with_grad)
        for param in self.params_with_grad:
            param.grad_added_to_main_grad = False
        for bucket_group in self.bucket_groups + self.expert_parallel_bucket_groups:
            bucket_group.reset()

    def start_grad_sync(self, *unused: Any) -> None:
        self.zero_stale()
        super().start_grad_sync(*unused)

    def finish_grad_sync(self, force_all_reduce: Optional[bool] = False) -> None:
        self.zero_stale()
        super().finish_grad_sync(force_all_reduce=force_all_reduce)

    @torch.no_grad()
    def zero_stale(self, params: Optional[Sequence[nn.Parameter]] = None) -> None:
        """Set stale main gradients to zero, for these parameters or for all."""
        stale = self._stale.copy() if params is None else self._stale.intersection(params)
        if stale:
            torch._foreach_zero_(main_gradients(stale))
            self._stale -= stale

    def end_replay(self) -> None:
        """Note that a CUDA graph has written all main gradients, so that none is stale."""
        self._stale.clear()

    @torch.no_grad()
    def _add_pending(self) -> None:
        """Copy pending gradients over stale main gradients, and add them to the others."""
        pending = self._pending.take()
        first: list[tuple[nn.Parameter, Tensor]] = []
        further: list[tuple[nn.Parameter, Tensor]] = []
        for param, grad in pending:
            (first if param in self._stale else further).append((param, grad))
            self._stale.discard(param)
        for write, pairs in ((torch._foreach_copy_, first), (self._add, further)):
            if pairs:
                write(main_gradients(param for param, _ in pairs), [grad for _, grad in pairs])
        self._reduce_if_overlapped([param for param, _ in pending])

    def _reduce_if_overlapped(self, ready: list[nn.Parameter]) -> None:
        if self.ddp_config.overlap_grad_reduce:
            for param in ready:
                self.param_to_bucket_group[param].register_grad_ready(param, self.force_all_reduce)


def main_gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the main gradients of trained parameters, which are added up over the micro-batches of a step."""
    return [getattr(param, "main_grad") for param in params]  # noqa: B009 - Megatron-Core's


@patches(
    "megatron-core 0.16",
    "core/optimizer/distrib_optimizer.py: _copy_model_grads_to_main_grads, get_main_grads_for_grad_norm",
    why="it builds views of gradients again in every step",
)
def share_main_gradients(optimizer: DistributedOptimizer) -> None:
    """Reuse the optimizer's views of the reduced gradients, and the list for the gradient norm, in every step.

    Megatron-Core builds both again in every step. If it copies a gradient to another dtype, nothing is reused.
    """
    if optimizer.is_stub_optimizer:  # it has no parameters
        return
    kind, this = type(optimizer), weakref.ref(optimizer)  # a cycle would keep process groups alive
    shared: list[tuple[nn.Parameter, Tensor]] = []
    in_norm: list[Tensor] = []

    def copy_or_share() -> None:
        if shared:
            for main, grad in shared:
                main.grad = grad
            return
        optimizer = this()
        assert optimizer is not None
        kind._copy_model_grads_to_main_grads(optimizer)
        groups = (*optimizer.shard_fp32_groups, *optimizer.shard_fp32_from_float16_groups)
        pairs = [(main, main.grad) for group in groups for main in group]
        buffers = {buffer.grad_data.untyped_storage()._cdata for buffer in optimizer.buffers}
        if all(grad is not None and grad.untyped_storage()._cdata in buffers for _, grad in pairs):
            shared.extend(pairs)
            in_norm.extend(kind.get_main_grads_for_grad_norm(optimizer))

    def gradients_of_norm() -> list[Tensor]:
        if in_norm:
            return in_norm
        gradients: list[Tensor] = kind.get_main_grads_for_grad_norm(this())
        return gradients

    optimizer._copy_model_grads_to_main_grads = copy_or_share
    optimizer.get_main_grads_for_grad_norm = gradients_of_norm
