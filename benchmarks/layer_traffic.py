"""Memory traffic of one layer outside of matrix products and attention, in passes over its tokens."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dit.planner.trace import fused_rms_norm
from dit.tracing.counter import flop_formulas, tensors_in

WRITE_ONLY = ("models",)
"""Arguments of fused operators that are only written."""
READ_ONLY = ("grads",)
"""Arguments that torch's AdamW writes only if it unscales gradients."""


@dataclass(frozen=True)
class Passes:
    """Traffic of one direction of a layer.

    Attributes:
        passes: bytes that memory-bound kernels read and write, divided by the size of one tensor of all tokens.
    """

    passes: float
    kernels: int
    products: int
    largest: tuple[tuple[str, float], ...]

    def __sub__(self, other: "Passes") -> "Passes":
        fewer = dict(other.largest)
        largest = sorted(((name, n - fewer.get(name, 0.0)) for name, n in self.largest), key=lambda pair: -pair[1])
        return Passes(
            *(self.passes - other.passes, self.kernels - other.kernels, self.products - other.products), tuple(largest)
        )


@dataclass(frozen=True)
class LayerTraffic:
    """Traffic of a layer in both directions.

    Attributes:
        saved: saved elements per token between the two, divided by the hidden size; shared tensors count once.
    """

    forward: Passes
    backward: Passes
    saved: float

    def __sub__(self, other: "LayerTraffic") -> "LayerTraffic":
        return LayerTraffic(self.forward - other.forward, self.backward - other.backward, self.saved - other.saved)


class _Counter(TorchDispatchMode):
    """Counts operations on fake tensors: each reads all arguments and writes all results; views move nothing."""

    def __init__(self, unit: int) -> None:
        super().__init__()
        self._formulas, self._unit = flop_formulas(), unit
        self._living: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._bytes: dict[str, int] = {}
        self._kernels = self._products = 0

    def take(self) -> Passes:
        """Return the counts since the last call."""
        largest = sorted(((name, n / self._unit) for name, n in self._bytes.items()), key=lambda pair: -pair[1])
        counts = Passes(sum(self._bytes.values()) / self._unit, self._kernels, self._products, tuple(largest))
        self._bytes, self._kernels, self._products = {}, 0, 0
        return counts

    def living(self) -> int:
        """Return the number of elements in existing storages that operations allocated."""
        return sum(count for _, count in self._living.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        arguments, results = tensors_in((*args, *kwargs.values())), tensors_in((out,))
        if not func.is_view:  # a view of a weight is not a new storage
            for result in results:
                self._watch(result)
        if func._overloadpacket in self._formulas:
            self._products += 1
        elif not func.is_view and func.namespace != "prim" and not func.__name__.startswith(("empty", "new_empty")):
            moved = sum(x.nbytes for x in (*arguments, *results))
            if func.__name__.startswith("_foreach_copy_"):
                moved = sum(x.nbytes for x in arguments)
            elif not results:  # it writes arguments, and may also read them
                moved += _written(func, args, divides=kwargs.get("grad_scale") is not None)
            if func.__name__.startswith(("copy_", "zero_", "fill_", "zeros", "ones", "new_zeros")):
                moved = sum(x.nbytes for x in arguments[1:]) + results[0].nbytes  # overwritten tensors are not read
            name = func.__name__.split(".")[0]
            self._bytes[name] = self._bytes.get(name, 0) + moved
            self._kernels += moved > 0
        return out

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._living:
            reference = weakref.ref(storage, lambda _: self._living.pop(key, None))
            self._living[key] = reference, storage.nbytes() // tensor.element_size()


def _written(func: Any, args: Sequence[Any], *, divides: bool) -> int:
    """Return the bytes of the arguments that an operator without results writes, except write-only ones.

    Args:
        divides: whether torch's AdamW divides its gradients.
    """
    excluded = WRITE_ONLY if divides else WRITE_ONLY + READ_ONLY
    return sum(
        x.nbytes
        for argument, value in zip(func._schema.arguments, args)
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in excluded
        for x in tensors_in((value,))
    )


def traffic(call: Callable[[], object], unit: int) -> Passes:
    """Count the traffic of a call on fake tensors; `unit` is in bytes."""
    counter = _Counter(unit)
    with counter:
        call()
    return counter.take()


def layer_traffic(build: Callable[[], Callable[[Tensor], Tensor]], tokens: int, hidden: int) -> LayerTraffic:
    """Count the traffic of a layer's forward and backward pass on fake tensors, in bf16.

    Args:
        build: returns a layer as a function of tokens; called with fake tensors enabled.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), fused_rms_norm(_RMSNorm):
        call = build()
        x_TD = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        grad_TD = torch.empty_like(x_TD)
        torch.autograd.grad(call(x_TD), x_TD, grad_TD)  # creates tensors that all layers share
        counter = _Counter(x_TD.nbytes)
        with counter:
            out_TD = call(x_TD)
            forward, saved = counter.take(), counter.living()
            out_TD.backward(grad_TD)
        return LayerTraffic(forward, counter.take(), saved / x_TD.numel())


class _RMSNorm(torch.autograd.Function):
    """The traffic of torch's RMS norm on CUDA: one kernel forward, two backward; on CPU it runs many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x = ctx.saved_tensors[0]
        of_weight = torch.linalg.vecdot(grad.flatten(0, -2), x.flatten(0, -2), dim=0)
        return torch.addcmul(grad, grad, x), of_weight
