"""Activation recompute (activation checkpointing).

`full` saves only the input of a layer and runs its forward pass again in the backward pass (Chen et al. 2016,
arXiv:1604.06174). `selective` saves the outputs of expensive operations (matrix products, attention, communication) and
recomputes cheap elementwise functions marked `recomputable`. Both give the same results as no recompute.

                 forward                                 backward
    none         x -> norm -> linear -> gelu -> linear   all intermediate tensors were saved
    selective    x -> norm -> linear -> gelu -> linear   norm and gelu are recomputed from saved tensors
    full         x -> norm -> linear -> gelu -> linear   everything is recomputed from x
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Literal, Optional, TypeVar, TypeVarTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

Arguments = TypeVarTuple("Arguments")
Out = TypeVar("Out")
RecomputeChoice = Literal["none", "selective", "full"]


def recompute_activations(layer: nn.Module, choice: RecomputeChoice) -> None:
    """Make a layer recompute activations in its backward pass.

    The layer's module hooks also run around the recomputation, so that Megatron-FSDP gathers its weights again.
    """
    if choice != "none":
        run = _run_selective if choice == "selective" else _run_full
        layer.forward = partial(run, layer.forward)


_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing", default=False)


def first_run() -> bool:
    """Return False during a recomputation, which counters must ignore."""
    return not _RECOMPUTING.get()


@contextmanager
def _recomputing() -> Iterator[None]:
    token = _RECOMPUTING.set(True)
    try:
        yield
    finally:
        _RECOMPUTING.reset(token)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _recomputing()


def _run_full(forward: Callable[[*Arguments], Out], *args: *Arguments) -> Out:
    # No layer draws random numbers from a generator, so no generator state needs to be saved.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)


class _Call:
    """One call of a recomputable function."""

    def __init__(self, function: Callable[..., Tensor], args: tuple[object, ...]) -> None:
        self.function, self.args = function, args
        self._inputs: tuple[object, ...] = ()
        self._result: Optional[Tensor] = None

    def result(self) -> Tensor:
        """Return the result with a separate autograd graph, recomputed at the first use."""
        if self._result is None:
            self._inputs = tuple(
                a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in self.args
            )
            with torch.enable_grad(), _recomputing():
                self._result = self.function(*self._inputs)
        return self._result

    def gradients(self, grad: Tensor) -> list[Optional[Tensor]]:
        """Return the gradient of each argument, and free the result."""
        result, inputs = self.result(), self._inputs
        tensors = [a for a in inputs if isinstance(a, Tensor) and a.requires_grad]
        grads = iter(torch.autograd.grad(result, tensors, grad))
        self._result, self._inputs = None, ()
        return [next(grads) if isinstance(a, Tensor) and a.requires_grad else None for a in inputs]


class _Context(FunctionCtx):
    call: _Call


class _Recomputed(torch.autograd.Function):
    """The result of a call whose intermediate tensors autograd does not save."""

    @staticmethod
    def forward(ctx: _Context, call: _Call, *args: object) -> Tensor:
        ctx.call = call
        return call.function(*args)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        return None, *ctx.call.gradients(grads[0])


@dataclass(frozen=True)
class _View:
    """A tensor in the storage of a result that can be recomputed."""

    result: Callable[[], Tensor]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def recomputed(self) -> Tensor:
        return self.result().detach().as_strided(self.shape, self.stride, self.offset)


class _Region:
    """The recomputable results in one forward pass of a layer.

    `pack` and `_unpack` are the hooks of `saved_tensors_hooks`: they replace a saved tensor by a `_View` if it is in
    the storage of a recomputable result.
    """

    def __init__(self) -> None:
        # By address of the storage. The weak reference prevents reuse of the address by another storage.
        self._results: dict[int, tuple[StorageWeakRef, Callable[[], Tensor]]] = {}

    def run(self, function: Callable[..., Tensor], args: tuple[object, ...]) -> Tensor:
        call = _Call(function, args)
        out = _Recomputed.apply(call, *args)
        self.register(out, call.result)
        return out

    def register(self, result: Tensor, recompute: Callable[[], Tensor]) -> None:
        """Save a function that recomputes the result instead of the result."""
        storage = StorageWeakRef(result.untyped_storage())
        self._results[storage.cdata] = storage, recompute

    def pack(self, tensor: Tensor) -> Tensor | _View:
        storage = StorageWeakRef(tensor.untyped_storage())
        entry = self._results.get(storage.cdata)
        if entry is None:
            return tensor
        return _View(entry[1], tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _unpack(saved: Tensor | _View) -> Tensor:
    return saved.recomputed() if isinstance(saved, _View) else saved


_REGION: ContextVar[Optional[_Region]] = ContextVar("region", default=None)


def _run_selective(forward: Callable[[*Arguments], Out], *args: *Arguments) -> Out:
    if not torch.is_grad_enabled():
        return forward(*args)
    region = _Region()
    token = _REGION.set(region)
    try:
        with saved_tensors_hooks(region.pack, _unpack):
            return forward(*args)
    finally:
        _REGION.reset(token)


def recomputable(function: Callable[[*Arguments], Tensor]) -> Callable[[*Arguments], Tensor]:
    """Mark a cheap function, so that selective recompute saves neither its result nor its intermediate tensors.

    The result must be a new tensor that is never modified in place. Arguments are positional.
    """

    @wraps(function)
    def call(*args: *Arguments) -> Tensor:
        # the compiler decides, or nothing is recomputed
        if torch.compiler.is_compiling() or (region := _REGION.get()) is None:
            return function(*args)
        grad = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        return region.run(function, args) if grad else function(*args)

    return call


def recomputes(result: Tensor, function: Callable[..., Tensor], *args: object) -> None:
    """Register a call that recomputes a result, so that selective recompute does not save the result.

    Args:
        result: a new tensor that is never modified in place, and whose own autograd function does not save it.
        function: returns a tensor with the same storage layout; it runs without an autograd graph.
        args: its arguments. Parameters are read when it runs, because FSDP may have gathered them again.
    """
    region = _REGION.get()
    if region is not None and result.requires_grad:
        values = [a.detach() if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) else a for a in args]
        region.register(result, partial(_without_graph, function, *values))


def _without_graph(function: Callable[..., Tensor], *args: object) -> Tensor:
    """Call a function without an autograd graph; its result is not kept, because a product uses it only once."""
    with torch.no_grad():
        return function(*args)
