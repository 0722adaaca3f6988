"""Tests of Triton kernels in Triton's interpreter, which is on for a whole process or not at all."""

import os
from importlib.metadata import version
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1" and version("triton").startswith("3.6."):
    # The interpreter of Triton 3.6 calls `int` on arrays of one element, which is an error since NumPy 2.5.
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_index(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_index
