"""Comparison of results with references, and measurement of memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from dit.layers.adaln import Modulation
from dit.optimizer.part_norms import part_of
from dit.verify.compare import SUM_RTOL, compare_training

# float32 against float64: a few hundred roundings of 6e-8 each; the largest observed error is 4e-6.
RTOL = 1e-5


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return |actual - exact| / |exact| in the Euclidean norm."""
    return float((actual.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp(min=1e-12))


def assert_equal_training(one: dict, many: dict) -> None:
    """Compare the results of `dit.verify.trial.train` on one rank and on several, including gradient norms of parts."""
    differences = compare_training(one, many).differences
    assert not differences, "\n".join(differences)  # pytest explains asserts only in test files
    expected = part_norms(one["gradients"])
    for result in (one, many):
        norms = result["part_norms"]
        assert norms.keys() == expected.keys(), (norms, expected)
        wrong = {p: (norms[p], norm) for p, norm in expected.items() if abs(norms[p] - norm) > SUM_RTOL * norm}
        assert not wrong, f"gradient norms of parts, measured and expected: {wrong}"


def part_norms(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of each part of a model from the global gradient of every parameter."""
    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        squares[part_of(name)] = squares.get(part_of(name), 0.0) + float(gradient.double().square().sum())
    return {f"grad_norm/{part}": square**0.5 for part, square in squares.items()}


def join_layers(network: nn.Module) -> nn.Module:
    """Let the first norm of a layer compute the last residual of the layer before it, as fused kernels do."""
    for module in network.modules():
        if isinstance(module, Modulation):
            module.kernels = replace(module.kernels, joins_layers=True)
    return network


class LiveBytes(TorchDispatchMode):
    """Adds up live storages that were allocated in its scope; views of older storages do not count.

    Attributes:
        peak: the largest number of live bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.allocations: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass, tree_leaves((args, kwargs)))):
            return NotImplemented  # a DTensor has no memory; operations on its shard are dispatched separately
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        # Tensors on the meta device have a size but no memory.
        allocations = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and not x.is_meta]
        allocations = [storage for storage in allocations if storage._cdata not in inputs]
        for storage in allocations:
            ref = StorageWeakRef(storage)
            self.allocations[ref.cdata] = ref
        if allocations:
            self.peak = max(self.peak, self.total())
        return out

    def total(self) -> int:
        # Look up each storage once: another thread (gloo's, autograd's) may free one between two lookups.
        storages = {cdata: torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in self.allocations}
        alive = {cdata: storage for cdata, storage in storages.items() if storage is not None}
        self.allocations = {cdata: self.allocations[cdata] for cdata in alive}
        # FSDP frees a storage by resizing it to 0 bytes.
        return sum(storage.nbytes() for storage in alive.values())
