"""Registration of kernels as torch operators `dit::name` that take little host time per call."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack

P = ParamSpec("P")
R = TypeVar("R")
_LIBRARY = torch.library.Library("dit", "FRAGMENT")
_TENSORS = torch.Tensor, torch.nn.Parameter


def operator(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that registers a function of tensors as the operator `dit::name`.

    The decorated function calls the operator if the compiler, a profiler, fake tensors or another dispatch mode trace
    it. Otherwise it calls the original function, because torch's dispatcher takes as long as the rest of the call.

    The function changes none of its arguments and is called inside of autograd functions only.
    `torch.library.custom_op` supports more than that, and takes longer in each call.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        registered: Callable[P, R] = getattr(torch.ops.dit, name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return (registered if _is_traced(args) else function)(*args, **kwargs)

        return call

    return register


def _is_traced(args: tuple[object, ...]) -> bool:
    """Return whether a tracer is active, or the first tensor is of a subclass."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack() or torch.autograd._profiler_enabled():
        return True
    for value in args:
        if value is not None:
            return type(value) not in _TENSORS
    return False


def results_of(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that registers a function which returns empty results of `dit::name`, for fake tensors."""
    return torch.library.register_fake(f"dit::{name}", lib=_LIBRARY)
