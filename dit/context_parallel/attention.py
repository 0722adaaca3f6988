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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from dit.context_parallel.partition import ContextSplit, Shares, context_rows
from dit.errors import ConfigError
from dit.joint_layout import JointLayout, joint_layout
from dit.kernels.attention import Attention
from dit.kernels.attention_blocks import Attended, Block, BlockAttention
from dit.layout import SequenceLayout

ContextComm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
SegmentComm = Literal["hybrid", "context"]
Order = Optional[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ContextAttention:
    """Self-attention over a context-parallel group, in place of the attention path of one device.

    Keys that every rank holds whole (text) are attended to without any exchange. In joint attention over text and image
    (`JointLayout`) every rank has its own copy of the text: its text queries, like its image queries, attend to that
    copy once and to all image keys by the scheme. What a copy gives is read by its own rank alone, or sent back to it
    by the exchange of heads, so the sum of the ranks' parameter gradients is exact.

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
    group: ProcessGroup
    inner: Optional[ProcessGroup] = None
    outer: Optional[ProcessGroup] = None
    segment_comm: SegmentComm = "hybrid"

    def __call__(
        self, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, layout_q: SequenceLayout, layout_k: SequenceLayout
    ) -> Tensor:
        layout_q, layout_k = layout_q.gathered, layout_k.gathered
        if isinstance(layout_q, JointLayout):
            return self._joint(q_TNH, k_KNH, v_KNH, layout_q)
        shares = context_rows(layout_q, self.group.size(), self.split)
        if layout_k.rows is None:
            return self.local(q_TNH, k_KNH, v_KNH, shares.blocks()[self.group.rank()], layout_k)
        return self.exchange(q_TNH, k_KNH, v_KNH, shares)

    def exchange(self, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, shares: Shares) -> Tensor:
        """Attend inside segments that are spread over the ranks; each rank gives its rows in ascending order."""
        own = shares.blocks()[self.group.rank()]
        if self.comm == "p2p":
            return _Ring.apply(_Plan(own, shares.blocks(), self.group, self.kernel), q_TNH, k_KNH, v_KNH)
        if self.comm == "all_gather":
            return _GatheredKeys.apply(self._gathering(own, shares), q_TNH, k_KNH, v_KNH)
        return self._by_heads(q_TNH, k_KNH, v_KNH, shares)

    def _gathering(self, own: SequenceLayout, shares: Shares, here: Optional[SequenceLayout] = None) -> "_Plan":
        """Return how this rank's queries attend to the keys of all ranks at once."""
        everything, order = shares.blocks(shares.size)[:1], shares.order(0, shares.size)
        return _Plan(own, everything, self.group, self.kernel, order, here)

    def _inner(self) -> tuple[ProcessGroup, int]:
        """Return the ranks that exchange heads, and the place of their tokens among those of all such groups."""
        if self.comm == "a2a":
            return self.group, 0
        assert self.inner is not None
        assert self.outer is not None
        return self.inner, self.outer.rank()

    def _across(self, own: SequenceLayout, shares: Shares, size: int, here: Optional[SequenceLayout] = None) -> "_Plan":
        """Return how tokens of `size` ranks, whose heads were exchanged, travel around the outer ring."""
        assert self.outer is not None
        return _Plan(own, shares.blocks(size), self.outer, self.kernel, here=here)

    def _by_heads(self, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, shares: Shares) -> Tensor:
        """Exchange tokens for heads, attend with all tokens of the inner group, and exchange back."""
        inner, index = self._inner()
        order, blocks = shares.order(index, inner.size()), shares.blocks(inner.size())
        q, k, v = tokens_for_heads([q_TNH, k_KNH, v_KNH], inner, order)
        if self.comm == "a2a":
            out = self.local(q, k, v, blocks[0], blocks[0])
        else:
            out = _Ring.apply(self._across(blocks[index], shares, inner.size()), q, k, v)
        return heads_for_tokens(out, inner, order)

    def _joint(self, q_JNH: Tensor, k_JNH: Tensor, v_JNH: Tensor, joint: JointLayout) -> Tensor:
        """Attend with this rank's text and image rows to its text and to the image rows of all ranks."""
        shares = context_rows(joint.image, self.group.size(), self.split)
        (text_k, image_k), (text_v, image_v) = joint.split(k_JNH), joint.split(v_JNH)
        tensors = (q_JNH, image_k, image_v, text_k, text_v)
        if self.comm == "p2p":
            return _Ring.apply(_Plan(joint, shares.blocks(), self.group, self.kernel, here=joint.text), *tensors)
        if self.comm == "all_gather":
            return _GatheredKeys.apply(self._gathering(joint, shares, joint.text), *tensors)
        return self._joint_by_heads(joint.split(q_JNH), (text_k, image_k), (text_v, image_v), joint, shares)

    def _joint_by_heads(
        self,
        q: tuple[Tensor, Tensor],
        k: tuple[Tensor, Tensor],
        v: tuple[Tensor, Tensor],
        joint: JointLayout,
        shares: Shares,
    ) -> Tensor:
        """As `_by_heads`, where of its text a rank takes only the heads that it gets for the image, and gives them out.

        Args:
            q, k, v: of text and image.
        """
        inner, index = self._inner()
        order, blocks = shares.order(index, inner.size()), shares.blocks(inner.size())
        images = tokens_for_heads([x[1] for x in (q, k, v)], inner, order)
        texts = [x[0].chunk(inner.size(), 1)[inner.rank()] for x in (q, k, v)]
        layout = joint_layout(joint.text, blocks[index])
        if self.comm == "a2a":
            q_JNH, k_JNH, v_JNH = (layout.join(*pair) for pair in zip(texts, images))
            out_JNH = self.local(q_JNH, k_JNH, v_JNH, layout, layout)
        else:
            plan = self._across(layout, shares, inner.size(), joint.text)
            out_JNH = _Ring.apply(plan, layout.join(texts[0], images[0]), *images[1:], *texts[1:])
        text, image = layout.split(out_JNH)
        return joint.join(_GatherHeads.apply(text, inner), heads_for_tokens(image, inner, order))


class _Exchange:
    """A tensor on its way to the next rank of a ring while another one arrives from the previous rank."""

    def __init__(self, x: Tensor, group: ProcessGroup) -> None:
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


def merge(joined: Attended, part: Attended) -> Attended:
    """Join the attention over two sets of keys, float32; a row without keys in both stays 0 with lse -inf."""
    lse_TN = torch.logaddexp(joined.lse_TN, part.lse_TN)
    # exp(-inf - -inf) is NaN: such a row has no keys at all and weighs nothing.
    keep, add = ((x - lse_TN).exp().nan_to_num(0.0)[..., None] for x in (joined.lse_TN, part.lse_TN))
    return Attended(keep * joined.out_TNH + add * part.out_TNH.float(), lse_TN)


@dataclass(frozen=True)
class _Plan:
    """How the queries of this rank meet all keys: everything that an exchange needs besides its tensors.

    Attributes:
        queries: layout of this rank's queries.
        blocks: layouts of the keys: of each rank of a ring, or of all ranks together where they are gathered.
        group: the ranks.
        kernel: the block kernel.
        order: from the rows rank by rank to the rows in ascending order, where they are gathered.
        here: layout of the keys that every rank has for itself; None for none.
    """

    queries: SequenceLayout
    blocks: tuple[SequenceLayout, ...]
    group: ProcessGroup
    kernel: BlockAttention
    order: Order = None
    here: Optional[SequenceLayout] = None


class _Context(FunctionCtx):
    """What the forward pass of `_Ring` and of `_GatheredKeys` saves."""

    plan: _Plan
    saved_tensors: tuple[Tensor, ...]


class _Ring(torch.autograd.Function):
    """Keys and values go round; each rank attends with its queries to one block after the other.

    Keys and values that stay `here` are one more block, which every rank has for itself.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        plan: _Plan,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *kv_here: Tensor,
    ) -> Tensor:
        rank, size, kernel = plan.group.rank(), plan.group.size(), plan.kernel
        travelling = torch.stack([k_TNH, v_TNH])
        lse_TN = torch.full(q_TNH.shape[:2], -torch.inf, device=q_TNH.device)
        joined = Attended(torch.zeros_like(q_TNH, dtype=torch.float32), lse_TN)
        for hop in range(size):
            coming = _Exchange(travelling, plan.group) if hop < size - 1 else None
            block = Block(q_TNH, travelling[0], travelling[1], plan.queries, plan.blocks[(rank - hop) % size])
            joined = merge(joined, kernel.forward(block))
            if coming is not None:
                travelling = coming.wait()
        here = _block_here(plan, q_TNH, kv_here)
        if here is not None:
            joined = merge(joined, kernel.forward(here))
        out = joined.out_TNH.to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, k_TNH, v_TNH, out, joined.lse_TN, *kv_here)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        q_TNH, k_TNH, v_TNH, out_TNH, lse_TN, *kv_here = ctx.saved_tensors
        plan, joined = ctx.plan, Attended(out_TNH, lse_TN)
        rank, size, kernel = plan.group.rank(), plan.group.size(), plan.kernel
        travelling, grad_TNH = torch.stack([k_TNH, v_TNH]), grads[0].contiguous()
        dq_TNH = torch.zeros_like(q_TNH, dtype=torch.float32)
        # The gradient of a block starts at the block's second stop and arrives at its owner with the last exchange;
        # the owner adds its own part. So it travels size - 1 hops, like the block itself.
        own, homeward = torch.zeros_like(travelling, dtype=torch.float32), None
        for hop in range(size):
            coming = _Exchange(travelling, plan.group) if hop < size - 1 else None
            block = Block(q_TNH, travelling[0], travelling[1], plan.queries, plan.blocks[(rank - hop) % size])
            dq, *parts = kernel.backward(grad_TNH, block, joined)
            dq_TNH += dq
            part = torch.stack(parts).float()
            if hop == 0:
                own = part
            else:
                if homeward is not None:
                    part += homeward.wait()
                homeward = _Exchange(part.to(travelling.dtype), plan.group)
            if coming is not None:
                travelling = coming.wait()
        if homeward is not None:
            own += homeward.wait()
        dk_TNH, dv_TNH = own.to(travelling.dtype)
        more, dkv_here = _backward_here(grad_TNH, _block_here(plan, q_TNH, kv_here), joined, kernel)
        dq_TNH = dq_TNH if more is None else dq_TNH + more
        return None, dq_TNH.to(q_TNH.dtype), dk_TNH, dv_TNH, *dkv_here


def _block_here(plan: _Plan, q_TNH: Tensor, kv_here: Sequence[Tensor]) -> Optional[Block]:
    """Return the block that does not travel; None where there is none."""
    if plan.here is None:
        return None
    k_here, v_here = kv_here
    return Block(q_TNH, k_here, v_here, plan.queries, plan.here)


def _backward_here(
    grad_TNH: Tensor, here: Optional[Block], joined: Attended, kernel: BlockAttention
) -> tuple[Optional[Tensor], tuple[Tensor, ...]]:
    """Return the parts of dq and of (dk, dv) of the block that does not travel; None and () where there is none."""
    if here is None:
        return None, ()
    dq, dk, dv = kernel.backward(grad_TNH, here, joined)
    return dq, (dk.to(here.k_KNH.dtype), dv.to(here.v_KNH.dtype))


class _GatheredKeys(torch.autograd.Function):
    """Every rank attends with its queries to all keys and values, gathered for the moment."""

    @staticmethod
    def forward(
        ctx: _Context,
        plan: _Plan,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *kv_here: Tensor,
    ) -> Tensor:
        k, v = (_gather(x, plan.group, plan.order) for x in (k_TNH, v_TNH))
        joined = plan.kernel.forward(Block(q_TNH, k, v, plan.queries, plan.blocks[0]))
        here = _block_here(plan, q_TNH, kv_here)
        if here is not None:
            joined = merge(Attended(joined.out_TNH.float(), joined.lse_TN), plan.kernel.forward(here))
        out = joined.out_TNH.to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, k_TNH, v_TNH, out, joined.lse_TN, *kv_here)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        q_TNH, k_TNH, v_TNH, out_TNH, lse_TN, *kv_here = ctx.saved_tensors
        plan, joined, grad_TNH = ctx.plan, Attended(out_TNH, lse_TN), grads[0].contiguous()
        k, v = (_gather(x, plan.group, plan.order) for x in (k_TNH, v_TNH))
        dq, *parts = plan.kernel.backward(grad_TNH, Block(q_TNH, k, v, plan.queries, plan.blocks[0]), joined)
        dkv = []
        for part in parts:
            rank_by_rank = part if plan.order is None else part[plan.order[1]]
            dkv.append(torch.empty_like(k_TNH, memory_format=torch.contiguous_format))
            dist.reduce_scatter_tensor(dkv[-1], rank_by_rank.to(k_TNH.dtype).contiguous(), group=plan.group)
        more, dkv_here = _backward_here(grad_TNH, _block_here(plan, q_TNH, kv_here), joined, plan.kernel)
        dq = dq if more is None else dq.float() + more
        return None, dq.to(q_TNH.dtype), *dkv, *dkv_here


def _gather(x_TNH: Tensor, group: ProcessGroup, order: Order) -> Tensor:
    """Return the rows of all ranks in ascending order."""
    gathered = x_TNH.new_empty(group.size() * x_TNH.shape[0], *x_TNH.shape[1:])
    dist.all_gather_into_tensor(gathered, x_TNH.contiguous(), group=group)
    return gathered if order is None else gathered[order[0]]


class _GroupContext(FunctionCtx):
    """What an exchange saves: the ranks among which its gradient travels back."""

    group: ProcessGroup


class _GatherHeads(torch.autograd.Function):
    """Every rank has a share of the heads of the same rows and gets all of them."""

    @staticmethod
    def forward(ctx: _GroupContext, x_KNH: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        shares = [torch.empty_like(x_KNH, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(shares, x_KNH.contiguous(), group=group)
        return torch.cat(shares, 1)

    @staticmethod
    def backward(ctx: _GroupContext, *grads: Tensor) -> tuple[Tensor, None]:
        shares = torch.stack(grads[0].chunk(ctx.group.size(), 1))
        grad = torch.empty_like(shares[0])
        dist.reduce_scatter_tensor(grad, shares.flatten(0, 1), group=ctx.group)
        return grad, None


class _AllToAll(torch.autograd.Function):
    """Part i of the first dimension goes to rank i."""

    @staticmethod
    def forward(ctx: _GroupContext, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        arrived = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, x.contiguous(), group=group)
        return arrived

    @staticmethod
    def backward(ctx: _GroupContext, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


def tokens_for_heads(xs_TNH: list[Tensor], group: ProcessGroup, order: Order) -> list[Tensor]:
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


def heads_for_tokens(x_TNH: Tensor, group: ProcessGroup, order: Order) -> Tensor:
    """Undo `tokens_for_heads` for one tensor."""
    rank_by_rank = x_TNH if order is None else x_TNH[order[1]]
    arrived = _AllToAll.apply(rank_by_rank.unflatten(0, (group.size(), -1)), group)
    return arrived.transpose(0, 1).flatten(1, 2)
