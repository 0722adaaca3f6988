"""How many bytes a piece of code leaves alive."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Adds up the storages made in its scope that are still alive; views of older ones are none.

    Attributes:
        peak: the most bytes that were alive at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = StorageWeakRef(tensor.untyped_storage())
                self.made[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.total())
        return out

    def total(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())
