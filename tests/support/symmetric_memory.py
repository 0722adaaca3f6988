"""Torch's products on symmetric memory, on CPU: its own fallbacks, which run functional collectives."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import _symmetric_memory

OPERATIONS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
_calls: Counter[str] = Counter()


def _counted(name: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        _calls[name] += 1
        return fallback(*args, **kwargs)

    return run


@functools.cache
def _register() -> None:
    """Register the fallbacks for CPU tensors; torch registers them for CUDA tensors in its test mode."""
    for name in OPERATIONS:
        fallback = getattr(_symmetric_memory, f"_{name}_fallback")
        torch.library.impl(f"symm_mem::{name}", "cpu", _counted(name, fallback))


@contextmanager
def symmetric_memory_on_cpu() -> Iterator[Counter[str]]:
    """Enter torch's test mode of symmetric memory; yield the number of calls of each operation."""
    _register()
    _calls.clear()
    with _symmetric_memory._test_mode():
        yield _calls
