"""Token exchanges: a permutation on one rank, or one all-to-all with uneven counts between ranks."""

from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Tokens to send, and positions of the received tokens.

        local tokens --send_index--> send buffer --all-to-all--> receive buffer --receive_index--> new local tokens

    Each token has at most one destination, so the inverse exchange is also the backward pass.

    Attributes:
        send_index: local indices of the tokens to send, ordered by destination rank, int64; None for all, in order.
        receive_index: index of each received token in the result, int64; None for the order of arrival. Other tokens of
            the result are zeros.
        tokens_in, tokens_out: number of local tokens before and after.
        send_counts, receive_counts: number of tokens sent to and received from each rank; None if no rank sends any.
    """

    send_index: Optional[Tensor]
    receive_index: Optional[Tensor]
    tokens_in: int
    tokens_out: int
    send_counts: Optional[tuple[int, ...]] = None
    receive_counts: Optional[tuple[int, ...]] = None

    @property
    def inverse(self) -> "ExchangePlan":
        """The plan that sends every token back."""
        return ExchangePlan(
            self.receive_index,
            self.send_index,
            self.tokens_out,
            self.tokens_in,
            self.receive_counts,
            self.send_counts,
        )


class _Context(FunctionCtx):
    plan: ExchangePlan
    group: Optional[ProcessGroup]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, plan: ExchangePlan, group: Optional[ProcessGroup]) -> Tensor:
        ctx.plan, ctx.group = plan, group
        tokens = x.contiguous() if plan.send_index is None else x.index_select(0, plan.send_index)
        if plan.send_counts is not None:
            assert plan.receive_counts is not None
            received = x.new_empty(sum(plan.receive_counts), *x.shape[1:])
            dist.all_to_all_single(received, tokens, list(plan.receive_counts), list(plan.send_counts), group=group)
            tokens = received
        if plan.receive_index is None:
            return tokens
        return x.new_zeros(plan.tokens_out, *x.shape[1:]).index_copy_(0, plan.receive_index, tokens)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grads[0], ctx.plan.inverse, ctx.group), None, None


def exchange(x: Tensor, plan: Optional[ExchangePlan], group: Optional[ProcessGroup] = None) -> Tensor:
    """Send the tokens of `x` to their destinations, differentiably; without a plan, return `x` itself."""
    return x if plan is None else _Exchange.apply(x, plan, group)
