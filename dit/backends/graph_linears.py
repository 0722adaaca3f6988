"""Parallel linears inside a compiled layer: Megatron-Core's parameters, with a forward pass that a compiler can trace.

Megatron-Core's own forward pass warns, waits for asynchronous sends and writes into buffers that it reuses, and each
ends a graph. Here sends are torch's functional collectives. On one tensor-parallel rank nothing is sent.

    column    x --gather (SP) or itself--> x W^T + b          gradient of x: reduce-scatter (SP) or all-reduce
    row       x W^T --reduce-scatter (SP) or all-reduce--> + b          gradient of x W^T: gather (SP) or itself
    gathered  x --itself--> x W^T + b --gather of features-->           see `dit.backends.gathered_linear`

Shape suffixes: T tokens, D any width.
"""

from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn.functional import linear

Send = Literal["itself", "gather", "reduce", "reduce_scatter", "gather_for_all", "own_part"]
BACKWARD: dict[Send, Send] = {
    "itself": "reduce",
    "reduce": "itself",
    "gather": "reduce_scatter",
    "reduce_scatter": "gather",
    "gather_for_all": "own_part",  # every rank has the gradient of all parts
    "own_part": "gather_for_all",
}


class OfRanks:
    """How many tensor-parallel ranks a linear is split over, which one this is, and the name of their group."""

    def __init__(self, group: Any) -> None:
        self.size = 1 if group is None else int(group.size())
        self.rank = 0 if group is None else int(group.rank())
        self.name = "" if self.size == 1 else str(group.group_name)


class GraphColumnLinear(ColumnParallelLinear):
    """See `dit.backends.provider.ColumnLinear`."""

    adds_bias = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = OfRanks(self.tp_group)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = sent(x_TD, "gather" if self.sequence_parallel else "itself", self.ranks)
        return linear(x_TD, self.weight, None if self.skip_bias_add else self.bias)


class GraphRowLinear(RowParallelLinear):
    """See `dit.backends.provider.RowLinear`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = OfRanks(self.tp_group)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return linear(x_TD, self.weight, None if self.skip_bias_add else self.bias)
        y_TD = linear(x_TD, self.weight)
        y_TD = sent(y_TD, "reduce_scatter" if self.sequence_parallel else "reduce", self.ranks)
        return y_TD if self.skip_bias_add or self.bias is None else y_TD + self.bias


class SumOverRanks(OfRanks):
    """Sums a tensor over the tensor-parallel ranks, and its gradient in the backward pass."""

    def __call__(self, x: Tensor) -> Tensor:
        return sent(sent(x, "reduce", self), "itself", self)


def sent(x_TD: Tensor, send: Send, ranks: OfRanks) -> Tensor:
    """Send the rows to the other ranks; nothing is sent where there are none."""
    if ranks.size == 1:
        return x_TD
    out: Tensor = _Sent.apply(x_TD, send, ranks.size, ranks.rank, ranks.name)
    return out


class _Sent(torch.autograd.Function):
    """A collective over the rows of tensor-parallel ranks, and its transpose in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, send: Send, size: int, rank: int, name: str) -> Tensor:
        ctx.send, ctx.size, ctx.rank, ctx.name = send, size, rank, name
        return _send(x_TD, send, size, rank, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _send(grads[0], BACKWARD[ctx.send], ctx.size, ctx.rank, ctx.name), None, None, None, None


def _send(x_TD: Tensor, send: Send, size: int, rank: int, name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    if send == "itself":
        return x_TD.view_as(x_TD)
    if send == "own_part":
        return x_TD.chunk(size)[rank].clone()
    x_TD = x_TD.contiguous()
    if send in ("gather", "gather_for_all"):
        out = ops.all_gather_into_tensor(x_TD, size, name)
    elif send == "reduce":
        out = ops.all_reduce(x_TD, "sum", name)
    else:
        out = ops.reduce_scatter_tensor(x_TD, "sum", size, name)
    waited: Tensor = ops.wait_tensor(out)
    return waited
