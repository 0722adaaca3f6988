"""Registration of kernels as torch operators `dit::name`, and calls of autograd functions, with little host time."""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch.autograd import Function
from torch.compiler import is_dynamo_compiling

Arguments = TypeVarTuple("Arguments")
R = TypeVar("R")
_LIBRARY = torch.library.Library("dit", "FRAGMENT")
_TENSORS = torch.Tensor, torch.nn.Parameter


def operator(
    name: str, empty_results: Callable[..., object]
) -> Callable[[Callable[[*Arguments], R]], Callable[[*Arguments], R]]:
    """Return a decorator that registers a function of tensors as the operator `dit::name`.

    The decorated function calls the operator if the compiler, a profiler, fake tensors or another dispatch mode trace
    it. Otherwise it calls the original function, because torch's dispatcher takes as long as the rest of the call.

    The function changes none of its arguments and is called inside of autograd functions only.
    `torch.library.custom_op` supports more than that, and takes longer in each call.

    Args:
        empty_results: returns uninitialised results for the same arguments, for fake tensors.
    """

    def register(function: Callable[[*Arguments], R]) -> Callable[[*Arguments], R]:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dit::{name}", empty_results, lib=_LIBRARY)
        registered: Callable[[*Arguments], R] = getattr(torch.ops.dit, name).default

        @wraps(function)
        def call(*args: *Arguments) -> R:
            return (registered if _is_traced(args) else function)(*args)

        return call

    return register


def launched_by(launcher: str) -> Callable[[Callable[[*Arguments], R]], Callable[[*Arguments], R]]:
    """Return a decorator that turns a function which allocates results into the operator that computes them.

    The operator calls the function, then the launcher with the same arguments and the allocated results.

    Args:
        launcher: `module.name` in `dit.kernels.fused.gpu`, whose arguments have the types of the function's; the
            operator is `dit::name`.
    """
    module, name = launcher.split(".")

    def register(empty_results: Callable[[*Arguments], R]) -> Callable[[*Arguments], R]:
        @wraps(empty_results)
        def run(*args: *Arguments) -> R:
            results = empty_results(*args)
            getattr(_gpu(module), name)(*args, results)
            return results

        return operator(name, empty_results)(run)

    return register


def apply(function: type[Function], *args: object) -> Any:
    """Call an autograd function without `Function.apply`, whose checks for other tracers take half of the host time."""
    if is_dynamo_compiling() or _are_functorch_transforms_active():
        return function.apply(*args)
    return super(Function, function).apply(*args)  # type: ignore[misc]


@cache
def _gpu(module: str) -> ModuleType:
    """Import a module of kernels, which needs Triton."""
    return import_module(f"dit.kernels.fused.gpu.{module}")


def _is_traced(args: tuple[object, ...]) -> bool:
    """Return whether a tracer is active, or the first argument other than None is of a subclass of Tensor."""
    if is_dynamo_compiling() or _len_torch_dispatch_stack() or _profiler_enabled():
        return True
    for value in args:
        if value is not None:
            return type(value) not in _TENSORS
    return False
