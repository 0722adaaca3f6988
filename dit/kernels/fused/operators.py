"""Registration of kernels as torch operators `dit::name` that take little host time per call."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_LIBRARY = torch.library.Library("dit", "FRAGMENT")


def operator(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that registers a function of tensors as the operator `dit::name` and returns the operator.

    The function changes none of its arguments and is called inside of autograd functions only.
    `torch.library.custom_op` supports more than that, and takes longer in each call.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        registered: Callable[P, R] = getattr(torch.ops.dit, name).default
        return registered

    return register


def results_of(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that registers a function which returns empty results of `dit::name`, for fake tensors."""
    return torch.library.register_fake(f"dit::{name}", lib=_LIBRARY)
