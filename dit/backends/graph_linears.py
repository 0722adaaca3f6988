"""Parallel linears inside a compiled layer: Megatron-Core's parameters, with a forward pass that a compiler can trace.

Megatron-Core's forward pass logs warnings, waits for asynchronous collectives and writes into reused buffers; each
breaks the graph. Here communication uses torch's functional collectives. One tensor-parallel rank communicates nothing.

    column    x --gather (SP) or identity--> x W^T + b          gradient of x: reduce-scatter (SP) or all-reduce
    row       x W^T --reduce-scatter (SP) or all-reduce--> + b          gradient of x W^T: gather (SP) or identity
    gathered  x --identity--> x W^T + b --gather of features-->         see `dit.backends.gathered_linear`

Shape suffixes: T tokens, D any width.
"""

from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn.functional import linear

Collective = Literal["identity", "gather", "reduce", "reduce_scatter", "gather_replicated", "local_part"]
BACKWARD: dict[Collective, Collective] = {
    "identity": "reduce",
    "reduce": "identity",
    "gather": "reduce_scatter",
    "reduce_scatter": "gather",
    "gather_replicated": "local_part",  # every rank has the gradient of all parts
    "local_part": "gather_replicated",
}


class TensorRanks:
    """Size and name of the tensor-parallel group of a linear, and the rank in it."""

    def __init__(self, group: Any) -> None:
        self.size = 1 if group is None else int(group.size())
        self.rank = 0 if group is None else int(group.rank())
        self.name = "" if self.size == 1 else str(group.group_name)


class GraphColumnLinear(ColumnParallelLinear):
    """See `dit.backends.provider.ColumnLinear`."""

    adds_bias = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = TensorRanks(self.tp_group)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = communicate(x_TD, "gather" if self.sequence_parallel else "identity", self.ranks)
        return linear(x_TD, self.weight, None if self.skip_bias_add else self.bias)


class GraphRowLinear(RowParallelLinear):
    """See `dit.backends.provider.RowLinear`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = TensorRanks(self.tp_group)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return linear(x_TD, self.weight, None if self.skip_bias_add else self.bias)
        y_TD = linear(x_TD, self.weight)
        y_TD = communicate(y_TD, "reduce_scatter" if self.sequence_parallel else "reduce", self.ranks)
        return y_TD if self.skip_bias_add or self.bias is None else y_TD + self.bias


class SumOverRanks(TensorRanks):
    """Sums a tensor over the tensor-parallel ranks, and its gradient in the backward pass."""

    def __call__(self, x: Tensor) -> Tensor:
        return communicate(communicate(x, "reduce", self), "identity", self)


def communicate(x_TD: Tensor, collective: Collective, ranks: TensorRanks) -> Tensor:
    """Run a differentiable collective over the rows of the tensor-parallel ranks; return `x_TD` on one rank."""
    if ranks.size == 1:
        return x_TD
    out: Tensor = _Communicate.apply(x_TD, collective, ranks.size, ranks.rank, ranks.name)
    return out


class _Communicate(torch.autograd.Function):
    """A collective over the rows of tensor-parallel ranks, and its transpose in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, collective: Collective, size: int, rank: int, name: str) -> Tensor:
        ctx.collective, ctx.size, ctx.rank, ctx.name = collective, size, rank, name
        return _run(x_TD, collective, size, rank, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _run(grads[0], BACKWARD[ctx.collective], ctx.size, ctx.rank, ctx.name), None, None, None, None


def _run(x_TD: Tensor, collective: Collective, size: int, rank: int, name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    if collective == "identity":
        return x_TD.view_as(x_TD)
    if collective == "local_part":
        return x_TD.chunk(size)[rank].clone()
    x_TD = x_TD.contiguous()
    if collective in ("gather", "gather_replicated"):
        out = ops.all_gather_into_tensor(x_TD, size, name)
    elif collective == "reduce":
        out = ops.all_reduce(x_TD, "sum", name)
    else:
        out = ops.reduce_scatter_tensor(x_TD, "sum", size, name)
    result: Tensor = ops.wait_tensor(out)
    return result
