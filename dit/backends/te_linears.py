"""Transformer Engine's linears, an option of `training.linears`.

This project has not run them yet: Transformer Engine has no CPU wheel, and no GPU result is committed.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from torch import Tensor
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

from dit.backends.pending_bias import PendingBias
from dit.kernels.fp8 import Fp8Products
from dit.settings import Fp8

RECIPES: dict[Fp8, Any] = {
    "tensorwise": Float8CurrentScaling,
    "blockwise": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}


def quantized(fp8: Optional[Fp8Products]) -> AbstractContextManager[Any]:
    """Return the context in which Transformer Engine quantises products.

    Its scales of matrices (`tensorwise`, `nvfp4`) compare the magnitudes of several ranks only where it gathers
    quantised tokens, and it rounds the gradients of `nvfp4` stochastically, so two layouts agree within the error of
    the format.
    """
    if fp8 is None:
        return nullcontext()
    if hasattr(te, "autocast"):  # since 2.8
        return te.autocast(enabled=True, recipe=RECIPES[fp8.kind](), amax_reduction_group=fp8.group)
    return te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[fp8.kind](), fp8_group=fp8.group)


class _Linear:
    """The call of both linears; see `dit.backends.linears`."""

    returns_bias = False
    fp8: Optional[Fp8Products] = None

    def forward(self, x_TD: Tensor) -> Tensor | PendingBias:
        with quantized(self.fp8):
            y_TD, bias = super().forward(x_TD)  # type: ignore[misc]
        return PendingBias(y_TD, bias) if self.returns_bias else y_TD


class TEColumnLinear(_Linear, TEColumnParallelLinear):
    """`ColumnLinear` with Transformer Engine."""


class TERowLinear(_Linear, TERowParallelLinear):
    """`RowLinear` with Transformer Engine."""
