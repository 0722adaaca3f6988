"""Activation recompute: what a layer would keep for its backward pass is made again instead.

`full` keeps a layer's input alone and runs the layer once more (Chen et al. 2016, arXiv:1604.06174). `selective` keeps
what is dear to make (matrix products, attention, what came over the network) and makes again what is cheap: the
functions marked `recomputable`. Neither changes any number.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Literal, Optional, TypeVar, TypeVarTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from dit.errors import ConfigError

Arguments = TypeVarTuple("Arguments")
Out = TypeVar("Out")
RecomputeChoice = Literal["none", "selective", "full"]


def check_recompute(choice: RecomputeChoice, layers: Optional[int]) -> None:
    """Check the settings `training.recompute` and `training.recompute_layers`.

    Raises:
        ConfigError: the choice is unknown, or a number of layers has no effect.
    """
    if choice not in get_args(RecomputeChoice):
        raise ConfigError(
            f"training.recompute={choice!r} is unknown; use one of {', '.join(get_args(RecomputeChoice))}"
        )
    if layers is not None and choice == "none":
        raise ConfigError(
            f"training.recompute_layers={layers} has no effect with training.recompute='none'; "
            "set that to 'selective' or 'full', or leave the number out"
        )
    if layers is not None and layers < 1:
        raise ConfigError(f"training.recompute_layers={layers} must be at least 1, or None for all layers")


def recompute_activations(layer: nn.Module, choice: RecomputeChoice) -> None:
    """Make a layer keep less for its backward pass.

    Its hooks stay around the new forward pass, so that Megatron-FSDP gathers its weights before they are used again.
    """
    if choice != "none":
        run = _run_selective if choice == "selective" else _run_full
        layer.forward = partial(run, layer.forward)


_REDOING: ContextVar[bool] = ContextVar("redoing", default=False)


def first_run() -> bool:
    """Tell whether this forward pass is the real one: what counts events must not count them a second time."""
    return not _REDOING.get()


@contextmanager
def _redoing() -> Iterator[None]:
    token = _REDOING.set(True)
    try:
        yield
    finally:
        _REDOING.reset(token)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _redoing()


def _run_full(forward: Callable[[*Arguments], Out], *args: *Arguments) -> Out:
    # Nothing here draws random numbers from a stream, so no generator's state needs to be kept.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)


class _Made:
    """One call of a recomputable function: enough to make its result again.

    Args:
        function: the function.
        args: its arguments; tensors among them are kept.
    """

    def __init__(self, function: Callable[..., Tensor], args: tuple[object, ...]) -> None:
        self.function, self.args = function, args
        self._inputs: tuple[object, ...] = ()
        self._result: Optional[Tensor] = None

    def again(self) -> Tensor:
        """Return the result with a graph of its own; made once, whoever asks first."""
        if self._result is None:
            self._inputs = tuple(
                a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in self.args
            )
            with torch.enable_grad(), _redoing():
                self._result = self.function(*self._inputs)
        return self._result

    def gradients(self, grad: Tensor) -> list[Optional[Tensor]]:
        """Return the gradient of each argument, and forget the result."""
        result, inputs = self.again(), self._inputs
        wanted = [a for a in inputs if isinstance(a, Tensor) and a.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, grad))
        self._result, self._inputs = None, ()
        return [next(found) if isinstance(a, Tensor) and a.requires_grad else None for a in inputs]


class _Context(FunctionCtx):
    made: _Made


class _Recomputed(torch.autograd.Function):
    """The result of a call whose inside autograd does not see."""

    @staticmethod
    def forward(ctx: _Context, made: _Made, *args: object) -> Tensor:
        ctx.made = made
        return made.function(*args)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        return None, *ctx.made.gradients(grads[0])


@dataclass(frozen=True)
class _View:
    """A tensor that lies in the storage of a result which can be made again."""

    made: _Made
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def again(self) -> Tensor:
        return self.made.again().detach().as_strided(self.shape, self.stride, self.offset)


class _Region:
    """One run of a layer: the results made in it that need not be kept."""

    def __init__(self) -> None:
        # A weak reference keeps the address of a storage from being used again, so that no other tensor can match.
        self._made: dict[int, tuple[StorageWeakRef, _Made]] = {}

    def run(self, function: Callable[..., Tensor], args: tuple[object, ...]) -> Tensor:
        made = _Made(function, args)
        out = _Recomputed.apply(made, *args)
        storage = StorageWeakRef(out.untyped_storage())
        self._made[storage.cdata] = storage, made
        return out

    def pack(self, tensor: Tensor) -> Tensor | _View:
        storage = StorageWeakRef(tensor.untyped_storage())
        found = self._made.get(storage.cdata)
        if found is None:
            return tensor
        return _View(found[1], tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _unpack(kept: Tensor | _View) -> Tensor:
    return kept.again() if isinstance(kept, _View) else kept


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
    """Mark a cheap function: under selective recompute neither its result nor its inside is kept.

    Its result must be a new tensor that nobody writes into. Arguments are given by position.
    """

    @wraps(function)
    def call(*args: *Arguments) -> Tensor:
        region = _REGION.get()
        grad = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        return region.run(function, args) if region is not None and grad else function(*args)

    return call
