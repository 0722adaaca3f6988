"""Transformer Engine's linears, an option of `training.linears`.

This project has not run them yet: Transformer Engine has no CPU wheel, and no GPU result is committed.
"""

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from torch import Tensor

from dit.backends.pending_bias import PendingBias


class TEColumnLinear(TEColumnParallelLinear):
    """`ColumnLinear` with Transformer Engine."""

    returns_bias = False

    def forward(self, x_TD: Tensor) -> Tensor | PendingBias:
        y_TD, bias = super().forward(x_TD)
        return PendingBias(y_TD, bias) if self.returns_bias else y_TD


class TERowLinear(TERowParallelLinear):
    """`RowLinear` with Transformer Engine."""

    returns_bias = False

    def forward(self, x_TD: Tensor) -> Tensor | PendingBias:
        y_TD, bias = super().forward(x_TD)
        return PendingBias(y_TD, bias) if self.returns_bias else y_TD
