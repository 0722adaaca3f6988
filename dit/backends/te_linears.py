"""Transformer Engine's linears, used only when asked for; nothing needs them.

Not run yet on any device of this project: there is no wheel for CPU, and no result is committed.
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
