"""Runs functions as CUDA graphs: the host launches one graph instead of each kernel."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dit.backends.device import capture_graph, graph_stream
from dit.errors import BatchError
from dit.kernels.graph_tables import graph_tables

WARM_UP = 2
"""Number of eager runs before the capture. They compile kernels and create tables and states on the device."""
COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten._foreach_copy_)

T = TypeVar("T")
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Records the operations of a function without running them; returns its result and a function that runs them."""
Runner = Callable[..., Any]
"""Calls a function with tensors and returns its result: `call`, or a `Graphed`, which repeats the captured function."""


def call(compute: Callable[..., T], *inputs: Tensor) -> T:
    """Call a function."""
    return compute(*inputs)


class _CaptureMode(TorchDispatchMode):
    """A dispatch mode in whose context compiled functions stay compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class NoCopiesFromHost(_CaptureMode):
    """Raises an error before an operation copies from host memory, which may be freed before the graph is replayed.

    CUDA would raise its own error for most of these copies, which does not name the cause.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in COPIES:
            device = kwargs.get("device") or tree_leaves(args[0])[0].device
            on_host = [x for x in tree_leaves(args[:2][-1]) if x.device.type == "cpu"]
            if on_host and device.type != "cpu":
                raise BatchError(
                    f"training.cuda_graph=True: the passes copy numbers of shape {list(on_host[0].shape)} from the "
                    "host, such as the lengths of texts; use texts of one length, or training.cuda_graph=False"
                )
        return func(*args, **kwargs)


class UsedMemory(_CaptureMode):
    """Collects the memory of the arguments of all operations in its context; memory that is freed is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = WeakValueDictionary[int, torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = storage
        return func(*args, **(kwargs or {}))


def capture_on_gpu(compute: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Capture a function as a CUDA graph."""
    with graph_tables() as tables, capture_graph() as replay, NoCopiesFromHost(), UsedMemory() as used:
        result = compute()
    # A graph stores only addresses. Caches, for example, may free memory that it uses; replays would then read other
    # values, or overwrite them. So the graph keeps the memory of all tensors that its operations were given.
    memory = tables, list(used.storages.values())

    def replay_with_memory(_memory: object = memory) -> None:  # the default keeps it allocated
        replay()

    return result, replay_with_memory


class Graphed:
    """Calls functions that differ only in their tensors: first eagerly, then as the CUDA graph of one of them.

    Args:
        capture: records the function.
    """

    def __init__(self, capture: Capture = capture_on_gpu) -> None:
        self._capture = capture
        self._runs = 0
        self._inputs: Sequence[Tensor] = ()
        self._result: Any = None
        self._replay: Optional[Callable[[], None]] = None

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    def __call__(self, compute: Callable[..., T], *inputs: Tensor) -> T:
        """Return the result of `compute(*inputs)`; after the capture, of the captured function with these inputs."""
        self._inputs = self._inputs or [torch.empty_like(x) for x in inputs]
        for fixed, x in zip(self._inputs, inputs, strict=True):
            assert (fixed.shape, fixed.dtype) == (x.shape, x.dtype)
            fixed.copy_(x)
        if self._runs < WARM_UP:
            self._runs += 1
            with graph_stream():
                return compute(*self._inputs)
        if self._replay is None:
            self._result, self._replay = self._capture(partial(compute, *self._inputs))
        self._replay()
        # The next replay overwrites the result, so return a copy.
        result: T = tree_map_only(Tensor, torch.clone, self._result)
        return result


def runner(*, graphed: bool) -> Runner:
    """Return a new `Graphed`, or `call`."""
    return Graphed() if graphed else call
