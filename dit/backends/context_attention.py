"""Attention over tokens that are spread over context-parallel ranks: four ways to bring queries and keys together.

| scheme | what travels | elements sent per rank, forward | backward |
|---|---|---|---|
| `p2p` | keys and values, to the next rank while a block is computed (ring) | 2 (T/c) h (c-1) | 2 x |
| `all_gather` | the same, all at once; again in the backward pass, so that no rank keeps them | 2 (T/c) h (c-1) | 2 x |
| `a2a` | queries, keys, values, outputs: tokens against heads (Ulysses) | 4 (T/c) h (c-1)/c | 1 x |
| `a2a+p2p` | tokens against heads among a adjacent ranks, | 4 (T/c) h (a-1)/a | 1 x |
| | then a ring across these groups | 2 (T/c) h (c/a-1) | 2 x |

T tokens in the pack, c ranks, h = heads x head size (of keys and of queries alike).
The ring sends gradients of keys and values in their own dtype; outputs, log-sum-exps and dq add up in float32.

Sources: Liu et al. 2023, arXiv:2310.01889 (ring); Jacobs et al. 2023, arXiv:2309.14509 (Ulysses); Fang and Zhao 2024,
arXiv:2405.07719 (both together); Megatron-Core's `cp_comm_type` (names).
"""

from dataclasses import dataclass
from typing import Any, Literal, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from dit.backends.attention import Attention
from dit.backends.attention_blocks import BlockAttention
from dit.backends.context_rows import ContextSplit, Shares, context_rows
from dit.batch import SequenceLayout
from dit.errors import ConfigError

ContextComm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
SegmentComm = Literal["hybrid", "context"]
Order = Optional[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ContextAttention:
    """Self-attention over a context-parallel group, in place of the attention path of one device.

    Keys that every rank holds whole (text) are attended to without any exchange.

    Attributes:
        local: the attention path of this device, for whole samples and for text.
        kernel: its block kernel, for parts of samples.
        comm: the scheme.
        split: how every pack was cut.
        group: all context-parallel ranks.
        inner, outer: for `a2a+p2p`, adjacent ranks that exchange heads, and the ring across them.
        segment_comm: how attention inside segments finer than samples gets them whole (see `segment_attention`).
    """

    local: Attention
    kernel: BlockAttention
    comm: ContextComm
    split: ContextSplit
    group: Any
    inner: Any = None
    outer: Any = None
    segment_comm: SegmentComm = "hybrid"

    def __call__(
        self, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, layout_q: SequenceLayout, layout_k: SequenceLayout
    ) -> Tensor:
        layout_q, layout_k = layout_q.gathered, layout_k.gathered
        shares = context_rows(layout_q, self.group.size(), self.split)
        if layout_k.rows is None:
            return self.local(q_TNH, k_KNH, v_KNH, shares.blocks()[self.group.rank()], layout_k)
        return self.exchange(q_TNH, k_KNH, v_KNH, shares)

    def exchange(self, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, shares: Shares) -> Tensor:
        """Attend inside segments that are spread over the ranks; each rank gives its rows in ascending order."""
        if self.comm == "p2p":
            return _Ring.apply(q_TNH, k_KNH, v_KNH, shares.blocks(), self.group, self.kernel)
        if self.comm == "all_gather":
            return _GatheredKeys.apply(q_TNH, k_KNH, v_KNH, shares, self.group, self.kernel)
        return self._by_heads(q_TNH, k_KNH, v_KNH, shares)

    def _by_heads(self, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, shares: Shares) -> Tensor:
        """Exchange tokens for heads, attend with all tokens of the inner group, and exchange back."""
        inner = self.group if self.comm == "a2a" else self.inner
        size, index = inner.size(), 0 if self.comm == "a2a" else self.outer.rank()
        order, blocks = shares.order(index, size), shares.blocks(size)
        q, k, v = tokens_for_heads([q_TNH, k_KNH, v_KNH], inner, order)
        if self.comm == "a2a":
            out = self.local(q, k, v, blocks[0], blocks[0])
        else:
            out = _Ring.apply(q, k, v, blocks, self.outer, self.kernel)
        return heads_for_tokens(out, inner, order)


class _Exchange:
    """A tensor on its way to the next rank of a ring while another one arrives from the previous rank."""

    def __init__(self, x: Tensor, group: Any) -> None:
        rank, size = group.rank(), group.size()
        following, previous = (dist.get_global_rank(group, (rank + hop) % size) for hop in (1, -1))
        self._leaving, self._arriving = x, torch.empty_like(x)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._leaving, following, group),
                dist.P2POp(dist.irecv, self._arriving, previous, group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._arriving


def merge(out_TNH: Tensor, lse_TN: Tensor, part_TNH: Tensor, part_lse_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Join the attention over two sets of keys, float32; a row without keys in both stays 0 with lse -inf."""
    joined_TN = torch.logaddexp(lse_TN, part_lse_TN)
    # exp(-inf - -inf) is NaN: such a row has no keys at all and weighs nothing.
    keep, add = ((x - joined_TN).exp().nan_to_num(0.0)[..., None] for x in (lse_TN, part_lse_TN))
    return keep * out_TNH + add * part_TNH.float(), joined_TN


class _Ring(torch.autograd.Function):
    """Keys and values go round; each rank attends with its queries to one block after the other."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        blocks: tuple[SequenceLayout, ...],
        group: Any,
        kernel: BlockAttention,
    ) -> Tensor:
        rank, size = group.rank(), group.size()
        travelling = torch.stack([k_TNH, v_TNH])
        out_TNH = torch.zeros_like(q_TNH, dtype=torch.float32)
        lse_TN = torch.full(q_TNH.shape[:2], -torch.inf, device=q_TNH.device)
        for hop in range(size):
            coming = _Exchange(travelling, group) if hop < size - 1 else None
            part = kernel.forward(q_TNH, travelling[0], travelling[1], blocks[rank], blocks[(rank - hop) % size])
            out_TNH, lse_TN = merge(out_TNH, lse_TN, *part)
            if coming is not None:
                travelling = coming.wait()
        out = out_TNH.to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, k_TNH, v_TNH, out, lse_TN)
        ctx.blocks, ctx.group, ctx.kernel = blocks, group, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Optional[Tensor], ...]:  # type: ignore[override]
        q_TNH, k_TNH, v_TNH, out_TNH, lse_TN = ctx.saved_tensors
        rank, size, blocks = ctx.group.rank(), ctx.group.size(), ctx.blocks
        travelling, grad_TNH = torch.stack([k_TNH, v_TNH]), grad_TNH.contiguous()
        dq_TNH = torch.zeros_like(q_TNH, dtype=torch.float32)
        # The gradient of a block starts at the block's second stop and arrives at its owner with the last exchange;
        # the owner adds its own part. So it travels size - 1 hops, like the block itself.
        own, homeward = torch.zeros_like(travelling, dtype=torch.float32), None
        for hop in range(size):
            coming = _Exchange(travelling, ctx.group) if hop < size - 1 else None
            dq, *parts = ctx.kernel.backward(
                grad_TNH,
                q_TNH,
                travelling[0],
                travelling[1],
                out_TNH,
                lse_TN,
                blocks[rank],
                blocks[(rank - hop) % size],
            )
            dq_TNH += dq
            part = torch.stack(parts).float()
            if hop == 0:
                own = part
            else:
                if homeward is not None:
                    part += homeward.wait()
                homeward = _Exchange(part.to(travelling.dtype), ctx.group)
            if coming is not None:
                travelling = coming.wait()
        if homeward is not None:
            own += homeward.wait()
        dk_TNH, dv_TNH = own.to(travelling.dtype)
        return dq_TNH.to(q_TNH.dtype), dk_TNH, dv_TNH, None, None, None


class _GatheredKeys(torch.autograd.Function):
    """Every rank attends with its queries to all keys and values, gathered for the moment."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        shares: Shares,
        group: Any,
        kernel: BlockAttention,
    ) -> Tensor:
        order, layouts = shares.order(0, shares.size), (shares.blocks()[group.rank()], shares.blocks(shares.size)[0])
        k, v = (_gather(x, group, order) for x in (k_TNH, v_TNH))
        out, lse_TN = kernel.forward(q_TNH, k, v, *layouts)
        out = out.to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, k_TNH, v_TNH, out, lse_TN)
        ctx.order, ctx.layouts, ctx.group, ctx.kernel = order, layouts, group, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Optional[Tensor], ...]:  # type: ignore[override]
        q_TNH, k_TNH, v_TNH, out_TNH, lse_TN = ctx.saved_tensors
        k, v = (_gather(x, ctx.group, ctx.order) for x in (k_TNH, v_TNH))
        dq, *parts = ctx.kernel.backward(grad_TNH.contiguous(), q_TNH, k, v, out_TNH, lse_TN, *ctx.layouts)
        grads = []
        for part in parts:
            rank_by_rank = part if ctx.order is None else part[ctx.order[1]]
            grads.append(torch.empty_like(k_TNH, memory_format=torch.contiguous_format))
            dist.reduce_scatter_tensor(grads[-1], rank_by_rank.to(k_TNH.dtype).contiguous(), group=ctx.group)
        return dq.to(q_TNH.dtype), *grads, None, None, None


def _gather(x_TNH: Tensor, group: Any, order: Order) -> Tensor:
    """Return the rows of all ranks in ascending order."""
    gathered = x_TNH.new_empty(group.size() * x_TNH.shape[0], *x_TNH.shape[1:])
    dist.all_gather_into_tensor(gathered, x_TNH.contiguous(), group=group)
    return gathered if order is None else gathered[order[0]]


class _AllToAll(torch.autograd.Function):
    """Part i of the first dimension goes to rank i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        arrived = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, x.contiguous(), group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _AllToAll.apply(grad, ctx.group), None


def tokens_for_heads(xs_TNH: list[Tensor], group: Any, order: Order) -> list[Tensor]:
    """Give away all but a share of the heads and get the tokens of the whole group for it, in one exchange.

    Returns:
        For each `[T, N, H]` the rows of all ranks in ascending order, `[T * size, N / size, H]`.

    Raises:
        ConfigError: the heads cannot be shared evenly.
    """
    size = group.size()
    for x in xs_TNH:
        if x.shape[1] % size:
            raise ConfigError(
                f"{x.shape[1]} heads of one rank cannot be shared by the {size} ranks of an all-to-all; use "
                "parallel.context_comm=p2p or all_gather, or fewer ranks (parallel.context_a2a_size)"
            )
    shares = [x.unflatten(1, (size, -1)) for x in xs_TNH]
    arrived = _AllToAll.apply(torch.cat([x.transpose(0, 1) for x in shares], 2), group).flatten(0, 1)
    joined = arrived if order is None else arrived[order[0]]
    return list(joined.split([x.shape[2] for x in shares], 1))


def heads_for_tokens(x_TNH: Tensor, group: Any, order: Order) -> Tensor:
    """Undo `tokens_for_heads` for one tensor."""
    rank_by_rank = x_TNH if order is None else x_TNH[order[1]]
    arrived = _AllToAll.apply(rank_by_rank.unflatten(0, (group.size(), -1)), group)
    return arrived.transpose(0, 1).flatten(1, 2)
