"""Tables that the kernels of a CUDA graph read.

    capture   allocate the table | launch the kernel that reads it
    end       copy the values to the table
    replay    run the kernel

A captured copy would read host memory that is freed before the replay, so values are copied once, after the capture.
A table must not be in the memory of the graph, where earlier kernels of each replay would overwrite it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from dit.layout import to_device

Tables = list[tuple[Tensor, Tensor]]
"""Tables on the device, and their values on the host."""

_captures: list[Tables] = []  # backward passes run in other threads, so this is no thread-local variable


@contextmanager
def graph_tables() -> Iterator[Tables]:
    """Collect the tables of a capture, and fill them when the context ends; the graph has to keep them allocated."""
    tables: Tables = []
    _captures.append(tables)
    try:
        yield tables
    finally:
        _captures.pop()
    for table, values in tables:
        table.copy_(to_device(values, table.device))


def is_capturing() -> bool:
    """Return whether a graph is being captured, which has to contain its own tables."""
    return bool(_captures)


def table_on(values: Tensor, device: torch.device) -> Tensor:
    """Return a table on the device; in `graph_tables`, it has its values when the context ends."""
    if not is_capturing():
        return to_device(values, device)
    with ThreadPoolExecutor(1) as thread:  # another thread has another stream, and is not captured
        table = thread.submit(torch.empty_like, values, device=device).result()
    _captures[-1].append((table, values))
    return table
