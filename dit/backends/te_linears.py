"""Transformer Engine's linears, an optional choice of `training.linears`.

Not yet run in this project: Transformer Engine has no CPU wheel, and no GPU result is committed.
"""

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from torch import Tensor


class TEColumnLinear(TEColumnParallelLinear):
    """Transformer Engine's form of `ColumnLinear`."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return super().forward(x_TD)[0]


class TERowLinear(TERowParallelLinear):
    """Transformer Engine's form of `RowLinear`."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return super().forward(x_TD)[0]
