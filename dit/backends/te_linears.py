"""Transformer Engine's linears, an option of `training.linears`.

This project has not run them yet: Transformer Engine has no CPU wheel, and no GPU result is committed.
"""

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from torch import Tensor


class TEColumnLinear(TEColumnParallelLinear):
    """`ColumnLinear` with Transformer Engine."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return super().forward(x_TD)[0]


class TERowLinear(TERowParallelLinear):
    """`RowLinear` with Transformer Engine."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return super().forward(x_TD)[0]
