"""Sequence of operations of a step on the device, to see whether a CUDA graph could repeat it.

A CUDA graph repeats the kernels of one step, so all steps must have

    the same operations in the same order
    tensors of the same shapes, allocated and freed in the same order
    the same numbers as arguments; others, such as the number of the step, must be in tensors
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.waits import NO_CAUSE, WaitCounter

NO_CAUSE.add(Path(__file__))


class Operation(NamedTuple):
    """An operation on the device.

    Attributes:
        shapes: shapes and types of its arguments and results.
        numbers: its arguments that are numbers.
    """

    name: str
    line: str
    shapes: tuple[Any, ...]
    live: int
    numbers: tuple[str, ...]


class SequenceRecorder(WaitCounter):
    """Records the operations of a step in the context of `meta_device`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def begin(self) -> None:
        super().begin()
        self.operations = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        arguments, results = tree_leaves((args, kwargs)), tree_leaves(result)
        tensors = [x for x in (*arguments, *results) if isinstance(x, Tensor)]
        if any(x.is_meta for x in tensors):
            for x in results:
                if isinstance(x, Tensor):
                    self.watch(x.untyped_storage())
            shapes = tuple((*x.shape, x.dtype, x.device.type) for x in tensors)
            numbers = tuple(repr(x) for x in arguments if isinstance(x, bool | int | float))  # NaN equals NaN
            self.operations.append(Operation(str(func), self.line(), shapes, self.live, numbers))
        return result


def differences(one: Sequence[Operation], other: Sequence[Operation]) -> Counter[str]:
    """Return the lines of the program whose operations differ between two steps, with the number of differences.

    If the operations themselves differ, their shapes and numbers are not compared.
    """
    names, other_names = ([f"operation {x.name}, {x.line}" for x in step] for step in (one, other))
    if names != other_names:
        return (Counter(names) - Counter(other_names)) + (Counter(other_names) - Counter(names))
    differing = Counter[str]()
    for x, y in zip(one, other):
        if x.shapes != y.shapes:
            differing[f"shapes {x.name}, {x.line}"] += 1
        elif x.numbers != y.numbers:
            differing[f"numbers {x.name}, {x.line}"] += 1
        elif x.live != y.live:
            differing[f"memory {x.name}, {x.line}"] += 1
    return differing
