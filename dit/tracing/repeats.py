"""Cache of operations on fake tensors, by the shapes of their arguments.

Layers and micro-batches repeat the same operations, and torch's fake tensor dispatch is slow.
"""

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from dit.patches import patches

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Argument types that are compared by value."""
NOT_BY_SHAPE = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Operations whose result depends on values, or that change the shape of an argument."""
SLICE = torch.ops.aten.slice.Tensor
CPU = torch.device("cpu")
_empty_strided = (
    torch._C._VariableFunctions.empty_strided
)  # a patch of Megatron-Core redirects torch.empty_strided on CPUs

Strided = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


@dataclass(frozen=True, slots=True)
class _Output:
    """One output of an operation.

    Attributes:
        argument: index of the argument that is returned as this output; None for a new tensor.
        strided: shape, strides and dtype; None if the output is not a tensor.
        offset: storage offset relative to the first argument if the output is a view of it; None for a tensor with new
            memory.
    """

    argument: Optional[int] = None
    strided: Optional[Strided] = None
    offset: Optional[int] = None


@dataclass(frozen=True, slots=True)
class _Answer:
    outputs: tuple[_Output, ...]
    container: Optional[type]


class _UncacheableError(Exception):
    """An argument is not a plain value, a tensor that its shape identifies, or a list of these."""


class FakeOpCache:
    """Cached results of operations on fake CPU tensors, possibly mixed with tables of real numbers."""

    @patches(
        "torch 2.11-2.14",
        "torch/_subclasses/fake_tensor.py: FakeTensor, in_kernel_invocation_manager",
        why="five times faster than torch's constructor",
    )
    def __init__(self) -> None:
        from torch._subclasses import fake_tensor

        self._fake = fake_tensor.FakeTensor
        self._in_kernel = fake_tensor.in_kernel_invocation_manager
        self._mode: Any = None
        self._state: dict[str, Any] = {}
        self._cache: dict[Hashable, Optional[_Answer]] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation: run it the first time, later return new tensors like the first result.

        An operation without results only writes values. Torch would compute some of them, such as a fused update, on
        tensors with memory.
        """
        if not func._schema.returns and any(isinstance(x, self._fake) for x in tensors_in(args)):
            return None
        if func is SLICE and self._mode is not None and isinstance(args[0], self._fake):
            return self._slice(*args, **kwargs)
        try:
            key = func, self._key(args), self._key(kwargs.items())
        except _UncacheableError:
            return func(*args, **kwargs)
        answer = self._cache.get(key)
        if answer is not None:
            return self._replay(answer, args)
        out = func(*args, **kwargs)
        if key not in self._cache:
            self._cache[key] = self._answer(func, args, kwargs, out)
        return out

    def _key(self, values: Iterable[Any]) -> tuple[Hashable, ...]:
        key: list[Hashable] = []
        for value in values:
            if isinstance(value, self._fake):
                if value.constant is not None:
                    raise _UncacheableError
                key.append(_strided(value))
            elif type(value) is Tensor and value.dim():  # type promotion treats tensors without dimensions differently
                key.append(("table", *_strided(value)))
            elif isinstance(value, list | tuple):
                key.append(self._key(value))
            elif isinstance(value, PLAIN):
                key.append((type(value), value))
            else:
                raise _UncacheableError
        return tuple(key)

    def _answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Optional[_Answer]:
        """Return the description of a result for the cache; None if the operation must always run."""
        tensors = tensors_in((args, tuple(kwargs.values())))
        if func is torch.ops.aten.as_strided.default or not self._by_shape(func, tensors):
            return None
        storages = [x.untyped_storage()._cdata for x in tensors]
        several = isinstance(out, list | tuple)
        outputs: list[_Output] = []
        for result in out if several else (out,):
            argument = next((i for i, value in enumerate(args) if value is result), None)
            if result is None or argument is not None:
                outputs.append(_Output(argument))
                continue
            if not isinstance(result, self._fake):
                return None
            self._remember(result)
            strided, storage, offset = _strided(result), result.untyped_storage(), result.storage_offset()
            if func.is_view and storage._cdata == storages[0] and result.dtype == args[0].dtype:
                outputs.append(_Output(strided=strided, offset=offset - args[0].storage_offset()))
                continue
            if storage._cdata in storages or offset or storage.nbytes() != _nbytes(strided):
                return None
            storages.append(storage._cdata)
            outputs.append(_Output(strided=strided))
        return _Answer(tuple(outputs), type(out) if several else None)

    def _by_shape(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        """Return whether the shapes of the arguments determine the result."""
        tables = [not isinstance(x, self._fake) for x in tensors]
        if any(tables) and (all(tables) or (tables[0] and (func.is_view or func._schema.is_mutable))):
            return False  # real results, or a view of a table
        # Indexing has such a tag because of masks, and torch raises an error for fake masks.
        return func is torch.ops.aten.index.Tensor or NOT_BY_SHAPE.isdisjoint(func.tags)

    def _replay(self, answer: _Answer, args: Sequence[Any]) -> Any:
        results = [self._result(output, args) for output in answer.outputs]
        return results[0] if answer.container is None else answer.container(results)

    def _result(self, output: _Output, args: Sequence[Any]) -> Optional[Tensor]:
        """Return an argument, or a tensor without memory in the shape of an output."""
        if output.strided is None:
            return None if output.argument is None else args[output.argument]
        shape, strides, dtype = output.strided
        with torch._C._DisableTorchDispatch():
            if output.offset is None:
                meta = _empty_strided(shape, strides, dtype=dtype, device="meta")
            else:
                offset = args[0].storage_offset() + output.offset
                meta = _empty_strided((0,), (1,), dtype=dtype, device="meta")
                meta.set_(args[0].untyped_storage(), offset, shape, strides)
        # Same as torch's constructor, but five times faster.
        fake = Tensor._make_subclass(self._fake, meta, False, dispatch_device=True, device_for_backend_keys=CPU)
        fake.__dict__.update(self._state)
        return fake

    def _slice(self, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Optional[Tensor]:
        """Return a slice; most slices of gradient buffers differ, so a cache would not contain them."""
        shape, strides = list(x.shape), list(x.stride())
        first, last, _ = slice(start, end).indices(shape[dim])
        shape[dim] = len(range(first, last, step))
        offset = first * strides[dim]
        strides[dim] *= step
        return self._result(_Output(strided=(torch.Size(shape), tuple(strides), x.dtype), offset=offset), (x,))

    def _remember(self, result: Any) -> None:
        """Record the initial attributes of a fake tensor."""
        if self._mode is not result.fake_mode:
            self._mode = result.fake_mode
            with self._in_kernel(self._mode):
                meta = torch.empty(0, device="meta")
            self._state = dict(self._fake(self._mode, meta, CPU).__dict__)


@functools.cache
def fake_op_cache() -> FakeOpCache:
    """Return the cache of this process, which all traces share."""
    return FakeOpCache()


def _strided(tensor: Tensor) -> Strided:
    return tensor.shape, tensor.stride(), tensor.dtype


def _nbytes(strided: Strided) -> int:
    """Return the storage size of a tensor that is not a view."""
    shape, strides, dtype = strided
    return 0 if 0 in shape else (1 + sum((size - 1) * step for size, step in zip(shape, strides))) * dtype.itemsize


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """List the tensors among arguments, including those in lists."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors
