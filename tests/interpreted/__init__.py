"""Tests of Triton kernels in Triton's interpreter, which a process enables for all kernels or for none.

Two defects of Triton's interpreter are corrected here. In Triton 3.6, `range` over tensors calls `int` on arrays of one
element, an error since NumPy 2.5. In Triton 3.9, `block & scalar` returns integers, which loads and stores reject.
The interpreter also searches Triton's modules for built-in functions in each call of a kernel, which takes 40 % of its
time; here each module is searched once.
"""

import functools
import inspect
import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor
    _builder = interpreter.InterpreterBuilder
    _load, _store = _builder.create_masked_load, _builder.create_masked_store

    def _patch_index(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def _load_masked(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return _load(self, pointers, mask, *rest)

    def _store_masked(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return _store(self, pointers, value, mask, *rest)

    @functools.cache
    def _builtins(module: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(module) if is_builtin(member)]

    def _patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        for name, member in _builtins(module):
            if getattr(module, name) is member:
                interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang_tensor = _patch_index
    _builder.create_masked_load, _builder.create_masked_store = _load_masked, _store_masked
