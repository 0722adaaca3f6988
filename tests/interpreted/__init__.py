"""Tests of Triton kernels in Triton's interpreter, which a process enables for all kernels or for none.

Two defects of Triton's interpreter are corrected here. In Triton 3.6, `range` over tensors calls `int` on arrays of one
element, an error since NumPy 2.5. In Triton 3.9, `block & scalar` returns integers, which loads and stores reject.
"""

import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
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

    interpreter._patch_lang_tensor = _patch_index
    _builder.create_masked_load, _builder.create_masked_store = _load_masked, _store_masked
