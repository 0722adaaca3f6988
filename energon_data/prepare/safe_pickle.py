"""Read pickles of older data sets (tensors, arrays, lists and dictionaries of them) without running their code.

A pickle is a program that may call any function that it names. This reader has a closed list of functions, which only
create numbers; any other name raises an error before it is called.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from dit.patches import patches
from dit.safe_files import read_torch
from energon_data.samples import SampleError

MAX_BYTES = 1 << 32
"""Longest part; those of older data sets are far shorter."""


def _storage(data: bytes) -> Any:
    """Replace `torch.storage._load_from_bytes`, which would run the pickle inside."""
    return read_torch(data)


def _array(kind: object, shape: object, code: object) -> np.ndarray:
    """Replace numpy's `_reconstruct`, which makes an empty array of any class."""
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _from_buffer(data: Any, dtype: object, shape: tuple[int, ...], order: Any) -> np.ndarray:
    """Replace numpy's `_frombuffer`, which protocol 5 uses for arrays."""
    if not isinstance(dtype, np.dtype) or not isinstance(data, (bytes, bytearray)):
        raise SampleError("pickled", "an array that is not a buffer of numbers")
    return np.frombuffer(bytearray(data), dtype).reshape(shape, order=order)


def _dtype(code: object, *_: object) -> np.dtype:
    """Replace `numpy.dtype`: number types only, no objects and no records."""
    if not isinstance(code, str) or np.dtype(code).kind not in "biufc":
        raise SampleError("pickled", f"an array of {code!r}; only arrays of numbers are read")
    return np.dtype(code)


@patches(
    "torch 2.11-2.14",
    "torch/_utils.py: _rebuild_tensor, _rebuild_tensor_v2",
    why="pickles of torch name this private function",
)
def _rebuild(*args: Any) -> Tensor:
    """Replace `torch._utils._rebuild_tensor_v2`, without its hooks."""
    storage, offset, size, stride = args[:4]
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


def _latin1(text: str, encoding: str) -> bytes:
    """Replace `_codecs.encode`, which protocol 2 uses for bytes."""
    if encoding != "latin1":
        raise SampleError("pickled", f"bytes in {encoding!r}; only latin1 is read")
    return text.encode("latin1")


_NUMPY = ("numpy.core", "numpy._core")
KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("collections", "OrderedDict"): OrderedDict,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _latin1,
    **{(f"{package}.multiarray", "_reconstruct"): _array for package in _NUMPY},
    **{(f"{package}.numeric", "_frombuffer"): _from_buffer for package in _NUMPY},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        function = KNOWN.get((module, name))
        if function is None:
            raise SampleError("pickled", f"it calls {module}.{name}, which tensors do not need; nothing was run")
        return function

    def persistent_load(self, pid: Any) -> Any:
        raise SampleError("pickled", "it refers to something outside the file; nothing was run")


def read_pickle(data: bytes) -> Any:
    """Return the tensors, arrays, texts, numbers, lists and dictionaries of a pickle."""
    # Python 2 wrote texts and bytes in the same way; latin1 can represent both.
    return _read(data, lambda: _Reader(io.BytesIO(data), encoding="latin1").load())


def read_torch_file(data: bytes) -> Any:
    """Read a file of `torch.save` with only tensors and plain containers."""
    return _read(data, lambda: read_torch(data))


def _read(data: bytes, read: Callable[[], Any]) -> Any:
    if len(data) > MAX_BYTES:
        raise SampleError("too_large", f"{len(data)} bytes of tensors, at most {MAX_BYTES}")
    try:
        return read()
    except SampleError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly any exception
        raise SampleError("pickled", f"unreadable: {type(error).__name__}: {error!s:.120}") from error


def as_tensor(value: Any) -> Optional[Tensor]:
    """Return a tensor or an array of floating-point numbers as a contiguous tensor; None for anything else."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = torch.from_numpy(np.ascontiguousarray(value))
    return value.contiguous() if isinstance(value, Tensor) and value.is_floating_point() else None
