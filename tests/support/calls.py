"""Counts of the operators that a step calls, and of the places where the host waits for the device."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = ("_local_scalar_dense", "equal", "masked_select", "nonzero", "unique", "_unique", "is_nonzero")
_TO_HOST = ("tolist", "numpy", "cpu", "item")


class CallCounter(TorchDispatchMode):
    """Counts calls of torch operators, after autograd, including views.

    Attributes:
        by_operation: number of calls by operator name.
        waits: calls for which the host of a GPU must wait, because they return a number or a number of rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: Counter[str] = Counter()
        self.waits = 0

    @property
    def calls(self) -> int:
        """Number of calls of aten operators."""
        return sum(self.by_operation.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            name = func.__name__.split(".")[0]
            self.by_operation[name] += 1
            self.waits += name.startswith(_WAITING) or _selects_by_mask(name, args)
            self.waits += name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        return func(*args, **(kwargs or {}))


def _selects_by_mask(name: str, args: Any) -> bool:
    """Return whether rows are selected by a mask, whose True values must be counted first."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


@contextmanager
def copies_to_host() -> Iterator[Counter[str]]:
    """Count calls of the methods that copy a tensor to the host, by name; on CPU these call no operator."""
    counts: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(self, *args, **kwargs)

        return call

    originals = {name: getattr(Tensor, name) for name in _TO_HOST}
    for name, method in originals.items():
        setattr(Tensor, name, counted(name, method))
    try:
        yield counts
    finally:
        for name, method in originals.items():
            setattr(Tensor, name, method)
