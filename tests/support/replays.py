"""CUDA graphs emulated on CPU: the operations of a function are recorded, and run again on the same tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
"""Operations whose result the host reads, or whose shape depends on values."""

POINT_TO_POINT = (torch.ops.c10d.send, torch.ops.c10d.recv_)


class Recording(TorchDispatchMode):
    """Records operations with their tensors, which stay allocated, and the original content of overwritten memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.overwritten: dict[int, tuple[Any, Any]] = {}
        self.unfinished_outputs: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in READS:
            raise RuntimeError(f"{func} reads a value, which a CUDA graph cannot")
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tree_leaves(value):
                    storage = x.untyped_storage()
                    if storage._cdata not in self.overwritten:
                        self.overwritten[storage._cdata] = storage, storage.clone()
        result = func(*args, **(kwargs or {}))
        # gloo's wait copies the sum into the output; a replay calls wait
        if func.overloadpacket is torch.ops.c10d._reduce_scatter_base_:
            self.unfinished_outputs.append(args[0].data_ptr())
        elif func.overloadpacket is torch.ops.aten.copy_ and args[0].data_ptr() in self.unfinished_outputs:
            self.unfinished_outputs.remove(args[0].data_ptr())
            return result
        self.operations.append((func, args, kwargs or {}, [x for x in tree_leaves(result) if isinstance(x, Tensor)]))
        return result

    def restore(self) -> None:
        """Restore the memory that operations overwrote."""
        for storage, values in self.overwritten.values():
            storage.copy_(values)
        self.overwritten.clear()

    def replay(self) -> None:
        """Run all operations again, and write the results to the same memory."""
        messages: list[Any] = []

        def finish() -> None:
            while messages:
                messages.pop().wait()

        with torch._C._AutoDispatchBelowAutograd():  # as recorded
            for func, args, kwargs, results in self.operations:
                is_queued = func.overloadpacket in POINT_TO_POINT  # a rank waits for what it sent after it receives
                if not is_queued:
                    finish()
                leaves = tree_leaves(func(*args, **kwargs))
                messages += [Work.unbox(work) for work in leaves if isinstance(work, torch.ScriptObject)]
                if not is_queued:
                    finish()
                again = [x for x in leaves if isinstance(x, Tensor)]
                for x, new in zip(results, again, strict=True):
                    if x.data_ptr() != new.data_ptr():
                        x.copy_(new)


def record(compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record a function, as `capture_on_gpu` does: memory that existed before keeps its content."""
    with Recording() as recording:
        result = compute()
    recording.restore()
    return result, recording.replay
