"""Rows on their way: to another place on the same rank, or to other ranks by one all-to-all of uneven shares."""

from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Route:
    """Where rows come from and where they go. No row goes to two places, so the way back is the gradient's.

    Attributes:
        take: the rows that leave, in the order of their ranks; None for all as they lie.
        put: where the rows that arrive are laid; None for as they come. Other rows become zero.
        rows_in, rows_out: rows here before and after.
        sent, received: rows that leave for and arrive from each rank; None where all stay on their rank.
    """

    take: Optional[Tensor]
    put: Optional[Tensor]
    rows_in: int
    rows_out: int
    sent: Optional[tuple[int, ...]] = None
    received: Optional[tuple[int, ...]] = None

    @property
    def back(self) -> "Route":
        """The way back."""
        return Route(self.put, self.take, self.rows_out, self.rows_in, self.received, self.sent)


class _Context(FunctionCtx):
    route: Route
    group: Optional[ProcessGroup]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, route: Route, group: Optional[ProcessGroup]) -> Tensor:
        ctx.route, ctx.group = route, group
        leaving = x.contiguous() if route.take is None else x.index_select(0, route.take)
        if route.sent is not None:
            assert route.received is not None
            arrived = x.new_empty(sum(route.received), *x.shape[1:])
            dist.all_to_all_single(arrived, leaving, list(route.received), list(route.sent), group=group)
            leaving = arrived
        if route.put is None:
            return leaving
        return x.new_zeros(route.rows_out, *x.shape[1:]).index_copy_(0, route.put, leaving)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Move.apply(grads[0], ctx.route.back, ctx.group), None, None


def move(x: Tensor, route: Optional[Route], group: Optional[ProcessGroup] = None) -> Tensor:
    """Move the rows of `x`, `[rows_in, ...]`, along a route: `[rows_out, ...]`; None leaves them where they are."""
    return x if route is None else _Move.apply(x, route, group)
