"""Attention over tokens that are split over context-parallel ranks, with four communication schemes.

| scheme | communication | elements sent per rank, forward | backward |
|---|---|---|---|
| `p2p` | keys and values, to the next rank while a block is computed (ring) | 2 (T/c) h (c-1) | 2 x |
| `all_gather` | all keys and values; again in the backward pass, so that they are not saved | 2 (T/c) h (c-1) | 2 x |
| `a2a` | queries, keys, values, outputs: tokens exchanged for heads (Ulysses) | 4 (T/c) h (c-1)/c | 1 x |
| `a2a+p2p` | tokens exchanged for heads among a adjacent ranks, | 4 (T/c) h (a-1)/a | 1 x |
| | then a ring across these groups | 2 (T/c) h (c/a-1) | 2 x |

T tokens in the pack, c ranks, h = heads x head size (the same for keys and queries).
The ring sends gradients of keys and values in their own dtype; outputs, log-sum-exps and dq are summed in float32.

The ring on 3 ranks. Rank r has the queries Qr; the keys and values of block b are (KV)b:

    hop 0   rank 0: Q0 with (KV)0    rank 1: Q1 with (KV)1    rank 2: Q2 with (KV)2
    hop 1   rank 0: Q0 with (KV)2    rank 1: Q1 with (KV)0    rank 2: Q2 with (KV)1
    hop 2   rank 0: Q0 with (KV)1    rank 1: Q1 with (KV)2    rank 2: Q2 with (KV)0

Shape suffixes: T query tokens, K key tokens, J joint text and image tokens, N heads, H head size.

Sources: Liu et al. 2023, arXiv:2310.01889 (ring); Jacobs et al. 2023, arXiv:2309.14509 (Ulysses); Fang and Zhao 2024,
arXiv:2405.07719 (both combined); Megatron-Core's `cp_comm_type` (names).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from dit.context_parallel.partition import ContextSplit, FixedPartition, Partition, context_partition
from dit.errors import ConfigError
from dit.joint_layout import JointLayout, joint_layout
from dit.kernels.attention import Attention
from dit.kernels.attention_blocks import Attended, Block, BlockAttention
from dit.layout import SequenceLayout

ContextComm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
SegmentComm = Literal["hybrid", "context"]
Order = Optional[tuple[Tensor, Tensor]]
"""The permutation from rank-by-rank to ascending order, and its inverse; None for the identity."""


@dataclass(frozen=True)
class ContextAttention:
    """Self-attention over a context-parallel group, in place of the attention of one device.

    Replicated keys (text) need no communication. In attention to text and image (keys with a `JointLayout`) the text is
    replicated and the image is split. On every rank, the queries of both, or of the image only, attend to the rank's
    copy of the text, and to all image keys by the scheme. A rank uses only the text outputs of its own copy, and an
    exchange of heads sends their gradients back to it, so the sum of the parameter gradients over ranks is exact.

    Attributes:
        local: the attention of this device, for full samples and for text.
        kernel: block kernel of this device, for parts of samples.
        inner, outer: for `a2a+p2p`, adjacent ranks that exchange heads, and the ring across them.
        segment_comm: the scheme for segments smaller than samples (see `segment_attention`).
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
        if isinstance(layout_k, JointLayout):
            return self._joint(q_TNH, k_KNH, v_KNH, layout_q, layout_k)
        if layout_q.local_indices is None:  # replicated queries and keys
            return self.local(q_TNH, k_KNH, v_KNH, layout_q, layout_k)
        partition = self.partition(layout_q)
        if layout_k.local_indices is None:
            # The layout of this pack, because its tables refer to the texts.
            local = layout_q.local or partition.blocks()[self.group.rank()]
            return self.local(q_TNH, k_KNH, v_KNH, local, layout_k)
        return self.exchange(q_TNH, k_KNH, v_KNH, partition)

    def partition(self, layout: SequenceLayout) -> Partition:
        """Return the partition of the pack of which a rank has these tokens, or these tokens and replicated texts."""
        if layout.is_fixed:
            return FixedPartition(layout, self.group.size(), self.split)
        pack = layout.image if isinstance(layout, JointLayout) else layout
        return context_partition(pack, self.group.size(), self.split)

    def exchange(self, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, partition: Partition) -> Tensor:
        """Attend inside segments that are split over the ranks, with the local tokens in ascending order."""
        if self.comm in ("a2a", "a2a+p2p"):
            return self._by_heads(q_TNH, k_KNH, v_KNH, partition)
        queries = partition.blocks()[self.group.rank()]
        if self.comm == "p2p":
            return _Ring.apply(_Plan(queries, partition.blocks(), self.group, self.kernel), q_TNH, k_KNH, v_KNH)
        return _GatheredKeys.apply(self._gathering(queries, partition), q_TNH, k_KNH, v_KNH)

    def _gathering(
        self, queries: SequenceLayout, partition: Partition, replicated: Optional[SequenceLayout] = None
    ) -> "_Plan":
        """Return the plan of attention of the local queries to the gathered keys of all ranks."""
        all_keys, order = partition.blocks(partition.size)[:1], partition.order(0, partition.size)
        return _Plan(queries, all_keys, self.group, self.kernel, order, replicated)

    def _inner(self) -> tuple[ProcessGroup, int]:
        """Return the group that exchanges heads, and the index of this group among all such groups."""
        if self.comm == "a2a":
            return self.group, 0
        assert self.inner is not None
        assert self.outer is not None
        return self.inner, self.outer.rank()

    def _across(
        self, queries: SequenceLayout, partition: Partition, size: int, replicated: Optional[SequenceLayout] = None
    ) -> "_Plan":
        """Return the plan of the outer ring for the tokens of `size` ranks, after their exchange of heads."""
        assert self.outer is not None
        return _Plan(queries, partition.blocks(size), self.outer, self.kernel, replicated=replicated)

    def _by_heads(self, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, partition: Partition) -> Tensor:
        """Exchange tokens for heads, attend with all tokens of the inner group, and exchange back."""
        inner, index = self._inner()
        order, blocks = partition.order(index, inner.size()), partition.blocks(inner.size())
        q, k, v = tokens_for_heads([q_TNH, k_KNH, v_KNH], inner, order)
        if self.comm == "a2a":
            out = self.local(q, k, v, blocks[0], blocks[0])
        else:
            out = _Ring.apply(self._across(blocks[index], partition, inner.size()), q, k, v)
        return heads_for_tokens(out, inner, order)

    def _joint(
        self, q_TNH: Tensor, k_JNH: Tensor, v_JNH: Tensor, layout_q: SequenceLayout, joint: JointLayout
    ) -> Tensor:
        """Attend to the text and to the image keys of all ranks.

        Args:
            layout_q: `joint` for queries of the text and the local image, or the layout of the local image.
        """
        partition = self.partition(joint)
        (text_k, image_k), (text_v, image_v) = joint.split(k_JNH), joint.split(v_JNH)
        text = joint.table(_text)
        tensors = (q_TNH, image_k, image_v, text_k, text_v)
        if self.comm in ("p2p", "all_gather"):
            queries = joint if layout_q is joint else partition.blocks()[self.group.rank()]
            if self.comm == "all_gather":
                return _GatheredKeys.apply(self._gathering(queries, partition, text), *tensors)
            plan = _Plan(queries, partition.blocks(), self.group, self.kernel, replicated=text)
            return _Ring.apply(plan, *tensors)
        text_q, image_q = joint.split(q_TNH) if layout_q is joint else (None, q_TNH)
        return self._joint_by_heads((text_q, text_k, text_v), [image_q, image_k, image_v], joint, partition)

    def _joint_by_heads(
        self,
        texts: tuple[Optional[Tensor], Tensor, Tensor],
        images: list[Tensor],
        joint: JointLayout,
        partition: Partition,
    ) -> Tensor:
        """Attend as in `_by_heads`; a rank processes only some heads of its text copy, then gathers all heads.

        Args:
            texts: queries, keys and values of the text; None for no queries.
        """
        inner, index = self._inner()
        order, blocks = partition.order(index, inner.size()), partition.blocks(inner.size())
        image_q, *image_kv = tokens_for_heads(images, inner, order)
        text_q, text_k, text_v = (None if x is None else x.chunk(inner.size(), 1)[inner.rank()] for x in texts)
        assert text_k is not None
        assert text_v is not None
        layout = joint.table(_with_image, blocks[index])
        queries = blocks[index] if text_q is None else layout
        q_TNH = image_q if text_q is None else layout.join(text_q, image_q)
        if self.comm == "a2a":
            k_JNH, v_JNH = (layout.join(*pair) for pair in zip((text_k, text_v), image_kv))
            out_TNH = self.local(q_TNH, k_JNH, v_JNH, queries, layout)
        else:
            plan = self._across(queries, partition, inner.size(), joint.table(_text))
            out_TNH = _Ring.apply(plan, q_TNH, *image_kv, text_k, text_v)
        if text_q is None:
            return heads_for_tokens(out_TNH, inner, order)
        text, image = layout.split(out_TNH)
        return joint.join(_GatherHeads.apply(text, inner), heads_for_tokens(image, inner, order))


def _text(joint: SequenceLayout) -> SequenceLayout:
    assert isinstance(joint, JointLayout)
    return joint.text.plain  # a copy, because the tables of the text have the result of `_with_image`


def _with_image(joint: SequenceLayout, image: SequenceLayout) -> JointLayout:
    assert isinstance(joint, JointLayout)
    return joint_layout(joint.text, image)


class _RingStep:
    """An asynchronous send to the next rank of a ring, and receive from the previous rank."""

    def __init__(self, x: Tensor, group: ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        following, previous = (dist.get_global_rank(group, (rank + hop) % size) for hop in (1, -1))
        self._sent, self._received = x, torch.empty_like(x)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, group),
                dist.P2POp(dist.irecv, self._received, previous, group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def merge(joined: Attended, part: Attended) -> Attended:
    """Merge the attention over two sets of keys, float32; a query without keys in both has out 0 and lse -inf.

    Source: Liu et al. 2023, arXiv:2310.01889; see `dit.kernels.attention_blocks`.
    """
    lse_TN = torch.logaddexp(joined.lse_TN, part.lse_TN)
    # exp(-inf - -inf) is NaN for a query without keys, whose weights are both 0.
    keep, add = ((x - lse_TN).exp().nan_to_num(0.0)[..., None] for x in (joined.lse_TN, part.lse_TN))
    return Attended(keep * joined.out_TNH + add * part.out_TNH.float(), lse_TN)


@dataclass(frozen=True)
class _Plan:
    """Arguments of an exchange other than its tensors.

    Attributes:
        blocks: layouts of the keys of each rank of a ring; if keys are gathered, the layout of all keys.
    """

    queries: SequenceLayout
    blocks: tuple[SequenceLayout, ...]
    group: ProcessGroup
    kernel: BlockAttention
    order: Order = None
    replicated: Optional[SequenceLayout] = None


class _Context(FunctionCtx):
    """Autograd context of `_Ring` and `_GatheredKeys`."""

    plan: _Plan
    saved_tensors: tuple[Tensor, ...]


class _Ring(torch.autograd.Function):
    """Ring attention, which sends blocks of keys and values from rank to rank.

    `replicated_kv` are replicated keys and values (text), an additional block that is not sent.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        plan: _Plan,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *replicated_kv: Tensor,
    ) -> Tensor:
        rank, size = plan.group.rank(), plan.group.size()
        kv = torch.stack([k_TNH, v_TNH])
        lse_TN = torch.full(q_TNH.shape[:2], -torch.inf, device=q_TNH.device)
        joined = Attended(torch.zeros_like(q_TNH, dtype=torch.float32), lse_TN)
        for hop in range(size):
            incoming = _RingStep(kv, plan.group) if hop < size - 1 else None
            block = Block(q_TNH, kv[0], kv[1], plan.queries, plan.blocks[(rank - hop) % size])
            joined = merge(joined, plan.kernel.forward(block))
            if incoming is not None:
                kv = incoming.wait()
        return _output(ctx, plan, joined, (q_TNH, k_TNH, v_TNH), replicated_kv)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        q_TNH, k_TNH, v_TNH, out_TNH, lse_TN, *replicated_kv = ctx.saved_tensors
        plan, joined = ctx.plan, Attended(out_TNH, lse_TN)
        rank, size, kernel = plan.group.rank(), plan.group.size(), plan.kernel
        kv, grad_TNH = torch.stack([k_TNH, v_TNH]), grads[0].contiguous()
        dq_TNH = torch.zeros_like(q_TNH, dtype=torch.float32)
        # From the second hop, the gradient of a block follows the block. After size - 1 hops, like the block itself, it
        # reaches the owner, which adds its part.
        dkv, returning = torch.zeros_like(kv, dtype=torch.float32), None
        for hop in range(size):
            incoming = _RingStep(kv, plan.group) if hop < size - 1 else None
            block = Block(q_TNH, kv[0], kv[1], plan.queries, plan.blocks[(rank - hop) % size])
            dq, *parts = kernel.backward(grad_TNH, block, joined)
            dq_TNH += dq
            part = torch.stack(parts).float()
            if hop == 0:
                dkv = part
            else:
                if returning is not None:
                    part += returning.wait()
                returning = _RingStep(part.to(kv.dtype), plan.group)
            if incoming is not None:
                kv = incoming.wait()
        if returning is not None:
            dkv += returning.wait()
        dk_TNH, dv_TNH = dkv.to(kv.dtype)
        more, replicated_dkv = _replicated_backward(plan, joined, grad_TNH, q_TNH, replicated_kv)
        dq_TNH = dq_TNH if more is None else dq_TNH + more
        return None, dq_TNH.to(q_TNH.dtype), dk_TNH, dv_TNH, *replicated_dkv


def _output(
    ctx: _Context, plan: _Plan, joined: Attended, qkv: Sequence[Tensor], replicated_kv: Sequence[Tensor]
) -> Tensor:
    """Merge the replicated block, if any; save the tensors of the backward pass, and return the output."""
    if plan.replicated is not None:
        k_KNH, v_KNH = replicated_kv
        block = Block(qkv[0], k_KNH, v_KNH, plan.queries, plan.replicated)
        joined = merge(Attended(joined.out_TNH.float(), joined.lse_TN), plan.kernel.forward(block))
    out = joined.out_TNH.to(qkv[0].dtype)
    ctx.save_for_backward(*qkv, out, joined.lse_TN, *replicated_kv)
    ctx.plan = plan
    return out


def _replicated_backward(
    plan: _Plan, joined: Attended, grad_TNH: Tensor, q_TNH: Tensor, replicated_kv: Sequence[Tensor]
) -> tuple[Optional[Tensor], tuple[Tensor, ...]]:
    """Return the parts of dq and of (dk, dv) of the replicated block; None and () without it."""
    if plan.replicated is None:
        return None, ()
    k_KNH, v_KNH = replicated_kv
    block = Block(q_TNH, k_KNH, v_KNH, plan.queries, plan.replicated)
    dq, dk, dv = plan.kernel.backward(grad_TNH, block, joined)
    return dq, (dk.to(k_KNH.dtype), dv.to(v_KNH.dtype))


class _GatheredKeys(torch.autograd.Function):
    """Attention of the local queries to all keys and values, which are gathered in forward and in backward."""

    @staticmethod
    def forward(
        ctx: _Context,
        plan: _Plan,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *replicated_kv: Tensor,
    ) -> Tensor:
        k, v = (_gather(x, plan.group, plan.order) for x in (k_TNH, v_TNH))
        joined = plan.kernel.forward(Block(q_TNH, k, v, plan.queries, plan.blocks[0]))
        return _output(ctx, plan, joined, (q_TNH, k_TNH, v_TNH), replicated_kv)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        q_TNH, k_TNH, v_TNH, out_TNH, lse_TN, *replicated_kv = ctx.saved_tensors
        plan, joined, grad_TNH = ctx.plan, Attended(out_TNH, lse_TN), grads[0].contiguous()
        k, v = (_gather(x, plan.group, plan.order) for x in (k_TNH, v_TNH))
        dq, *parts = plan.kernel.backward(grad_TNH, Block(q_TNH, k, v, plan.queries, plan.blocks[0]), joined)
        dkv = []
        for part in parts:
            rank_by_rank = part if plan.order is None else part[plan.order[1]]
            dkv.append(torch.empty_like(k_TNH, memory_format=torch.contiguous_format))
            dist.reduce_scatter_tensor(dkv[-1], rank_by_rank.to(k_TNH.dtype).contiguous(), group=plan.group)
        more, replicated_dkv = _replicated_backward(plan, joined, grad_TNH, q_TNH, replicated_kv)
        dq = dq if more is None else dq.float() + more
        return None, dq.to(q_TNH.dtype), *dkv, *replicated_dkv


def _gather(x_TNH: Tensor, group: ProcessGroup, order: Order) -> Tensor:
    """Gather the tokens of all ranks in ascending order."""
    gathered = x_TNH.new_empty(group.size() * x_TNH.shape[0], *x_TNH.shape[1:])
    dist.all_gather_into_tensor(gathered, x_TNH.contiguous(), group=group)
    return gathered if order is None else gathered[order[0]]


class _GroupContext(FunctionCtx):
    """Autograd context of an exchange, with the group of the backward exchange."""

    group: ProcessGroup


class _GatherHeads(torch.autograd.Function):
    """Gather the heads of the same tokens from all ranks."""

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
    """Send part i of the first dimension to rank i."""

    @staticmethod
    def forward(ctx: _GroupContext, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: _GroupContext, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


def tokens_for_heads(xs_TNH: list[Tensor], group: ProcessGroup, order: Order) -> list[Tensor]:
    """Exchange all heads of the local tokens for some heads of all tokens of the group, in one all-to-all.

    Two ranks, 2 heads (x, y), tokens 0 and 1 local to rank 0, tokens 2 and 3 to rank 1:

        rank 0: x0 x1 y0 y1  --->  x0 x1 x2 x3
        rank 1: x2 x3 y2 y3  --->  y0 y1 y2 y3

    Args:
        xs_TNH: tensors of the local tokens, which may differ in the number of heads; sent together.

    Returns:
        For each tensor `[T, N, H]`, the tokens of all ranks in ascending order, `[T * size, N / size, H]`.
    """
    size = group.size()
    for x in xs_TNH:
        if x.shape[1] % size:
            raise ConfigError(
                f"{x.shape[1]} heads of one rank cannot be split over the {size} ranks of an all-to-all; use "
                "parallel.context_comm=p2p or all_gather, or fewer ranks (parallel.context_a2a_size)"
            )
    shares = [x.unflatten(1, (size, -1)) for x in xs_TNH]
    received = _AllToAll.apply(torch.cat([x.transpose(0, 1) for x in shares], 2), group).flatten(0, 1)
    joined = received if order is None else received[order[0]]
    return list(joined.split([x.shape[2] for x in shares], 1))


def heads_for_tokens(x_TNH: Tensor, group: ProcessGroup, order: Order) -> Tensor:
    """Invert `tokens_for_heads` for one tensor: `[T * size, N / size, H]` becomes `[T, N, H]`."""
    rank_by_rank = x_TNH if order is None else x_TNH[order[1]]
    received = _AllToAll.apply(rank_by_rank.unflatten(0, (group.size(), -1)), group)
    return received.transpose(0, 1).flatten(1, 2)
