"""Attention to one block of keys, with the log-sum-exp for merging blocks.

With s = q k^T / sqrt(H) over the keys of one block, out = softmax(s) v and lse = log sum exp(s). Two blocks a, b merge
to lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. The
backward pass of a block needs only the merged out and lse, because its probabilities are exp(s - lse).

Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax); Liu et al. 2023, arXiv:2310.01889 (ring).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from dit.errors import BatchError
from dit.kernels.attention import MOST_SEGMENTS, MOST_SUMS, count_sums, padded_segments
from dit.kernels.segment_groups import segment_groups
from dit.layout import SequenceLayout, to_device


class Block(NamedTuple):
    """Queries and a block of keys, with their layouts; segments may be empty.

    There may be fewer key heads than query heads if the kernel supports it.
    """

    q_TNH: Tensor
    k_KNH: Tensor
    v_KNH: Tensor
    layout_q: SequenceLayout
    layout_k: SequenceLayout


class Attended(NamedTuple):
    """Attention output `[T, N, H]` and log-sum-exp `[T, N]` (float32); 0 and -inf for queries without keys."""

    out_TNH: Tensor
    lse_TN: Tensor


class BlockAttention(ABC):
    """Segment attention over a block of keys."""

    @abstractmethod
    def forward(self, block: Block) -> Attended:
        """Attend to the keys of the block."""

    @abstractmethod
    def backward(self, grad_TNH: Tensor, block: Block, joined: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's parts of dq, dk, dv; 0 for padding."""


class EagerBlocks(BlockAttention):
    """The formulas in float32 for every device and dtype, the reference of all kernels."""

    def forward(self, block: Block) -> Attended:
        q_TNH, k_KNH, v_KNH, layout_q, layout_k = block
        out_TNH = torch.zeros_like(q_TNH, dtype=torch.float32)
        lse_TN = torch.full(q_TNH.shape[:2], -torch.inf, device=q_TNH.device)
        for rows_q, rows_k, count, mask in _groups(layout_q, layout_k):
            q = _dense(q_TNH, rows_q, count)
            k, v = (_grouped(x, q_TNH, rows_k, count) for x in (k_KNH, v_KNH))
            scores = torch.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
            lse = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).logsumexp(-1)
            out = torch.einsum("bnqk,bknh->bqnh", _weights(scores, lse, mask), v)
            out_TNH[rows_q] = out.flatten(0, 1)
            lse_TN[rows_q] = lse.transpose(1, 2).flatten(0, 1)
        return Attended(out_TNH, lse_TN)

    def backward(self, grad_TNH: Tensor, block: Block, joined: Attended) -> tuple[Tensor, Tensor, Tensor]:
        (q_TNH, k_KNH, v_KNH, layout_q, layout_k), (out_TNH, lse_TN) = block, joined
        dq_TNH, dk_KNH, dv_KNH = (torch.zeros_like(x, dtype=torch.float32) for x in (q_TNH, k_KNH, v_KNH))
        for rows_q, rows_k, count, mask in _groups(layout_q, layout_k):
            q, grad, out = (_dense(x, rows_q, count) for x in (q_TNH, grad_TNH, out_TNH))
            k, v = (_grouped(x, q_TNH, rows_k, count) for x in (k_KNH, v_KNH))
            scale = q.shape[-1] ** -0.5
            lse = lse_TN[rows_q].unflatten(0, (count, -1)).transpose(1, 2)
            weights = _weights(torch.einsum("bqnh,bknh->bnqk", q, k) * scale, lse, mask)
            # Row sums of dP * P over the keys of all blocks: sum_k P_k (v_k . g) = out . g.
            delta = (grad * out).sum(-1).transpose(1, 2)[..., None]
            dscores = weights * (torch.einsum("bqnh,bknh->bnqk", grad, v) - delta) * scale
            dq_TNH[rows_q] = torch.einsum("bnqk,bknh->bqnh", dscores, k).flatten(0, 1)
            dk = torch.einsum("bnqk,bqnh->bknh", dscores, q)
            dv = torch.einsum("bnqk,bqnh->bknh", weights, grad)
            dk_KNH[rows_k], dv_KNH[rows_k] = (
                x.unflatten(2, (k_KNH.shape[1], -1)).sum(3).flatten(0, 1) for x in (dk, dv)
            )
        return dq_TNH, dk_KNH, dv_KNH


def _groups(
    layout_q: SequenceLayout, layout_k: SequenceLayout
) -> Iterator[tuple[Tensor | slice, Tensor | slice, int, Optional[Tensor]]]:
    """Yield query rows, key rows, number of segments and mask of groups of segments of equal lengths.

    A pack of fixed size is one group of one segment, with a mask `[T, K]`: its shape does not depend on lengths.
    """
    if layout_q.is_fixed:
        same_TK = layout_q.segment_ids_T[:, None] == layout_k.segment_ids_T
        yield slice(None), slice(None), 1, same_TK & layout_q.valid_T[:, None] & layout_k.valid_T
        return
    for group in segment_groups(layout_q, layout_k):
        yield *group, None


def _weights(scores: Tensor, lse: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Return the probabilities of the keys; 0 outside of the mask, also for a query without keys."""
    weights = (scores - lse[..., None]).exp()
    return weights if mask is None else weights.masked_fill(~mask, 0.0)


def _dense(x_TNH: Tensor, rows: Tensor | slice, count: int) -> Tensor:
    return x_TNH[rows].float().unflatten(0, (count, -1))


def _grouped(x_KNH: Tensor, q_TNH: Tensor, rows: Tensor | slice, count: int) -> Tensor:
    """Return keys or values `[count, n, N, H]`, each key head repeated for the query heads that share it."""
    return _dense(x_KNH, rows, count).repeat_interleave(q_TNH.shape[1] // x_KNH.shape[1], 2)


class FlashBlocks(BlockAttention):
    """torch's flash-attention kernel for packed sequences (CUDA, bf16 or fp16)."""

    def __init__(self) -> None:
        self._forward: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._flash_attention_forward
        self._backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.aten._flash_attention_backward

    def forward(self, block: Block) -> Attended:
        q_TNH, k_KNH, v_KNH, layout_q, layout_k = block
        segments = _segments(layout_q, layout_k)
        lse_TN = torch.full(q_TNH.shape[:2], -torch.inf, device=q_TNH.device)
        if segments is None:
            return Attended(torch.zeros_like(q_TNH), lse_TN)
        tokens, heads, features = q_TNH.shape
        if segments.number > MOST_SEGMENTS or count_sums(heads, tokens, features, segments.number) > MOST_SUMS:
            raise BatchError(
                f"{segments.number} segments of {tokens} local tokens exceed the limits of FlashAttention; use shorter "
                "packs, more context-parallel ranks, or parallel.context_comm=a2a"
            )
        q, k, v = _take(q_TNH, segments.rows_q), _take(k_KNH, segments.rows_k), _take(v_KNH, segments.rows_k)
        out, lse_NT, *_ = self._forward(q, k, v, *segments.lengths, 0.0, False, False)
        lse = lse_NT.T
        if segments.rows_q is None:  # some versions of the kernel return +inf for queries without keys
            return Attended(out, lse.masked_fill(lse.isposinf(), -torch.inf) if layout_q.is_fixed else lse)
        out_TNH = torch.zeros_like(q_TNH).index_copy(0, segments.rows_q, out)
        return Attended(out_TNH, lse_TN.index_copy(0, segments.rows_q, lse))

    def backward(self, grad_TNH: Tensor, block: Block, joined: Attended) -> tuple[Tensor, Tensor, Tensor]:
        (q_TNH, k_KNH, v_KNH, layout_q, layout_k), (out_TNH, lse_TN) = block, joined
        segments = _segments(layout_q, layout_k)
        if segments is None:
            return torch.zeros_like(q_TNH), torch.zeros_like(k_KNH), torch.zeros_like(v_KNH)
        grad, q, out, lse = (_take(x, segments.rows_q) for x in (grad_TNH, q_TNH, out_TNH, lse_TN))
        k, v = (_take(x, segments.rows_k) for x in (k_KNH, v_KNH))
        seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        lse_NT = lse.T.contiguous()
        dq, dk, dv = self._backward(grad, q, k, v, out, lse_NT, *segments.lengths, 0.0, False, seed, unused)
        return (
            _put(dq, q_TNH, segments.rows_q),
            _put(dk, k_KNH, segments.rows_k),
            _put(dv, v_KNH, segments.rows_k),
        )


class _Segments(NamedTuple):
    """The segments with both queries and keys, without padding, as arguments of the kernel; all, in fixed packs.

    Attributes:
        rows_q, rows_k: indices of their tokens, int64; None for all tokens.
        lengths: cu_seqlens of queries and of keys (int32), maximal lengths of queries and of keys.
    """

    number: int
    rows_q: Optional[Tensor]
    rows_k: Optional[Tensor]
    lengths: tuple[Tensor, Tensor, int, int]


def _segments(layout_q: SequenceLayout, layout_k: SequenceLayout) -> Optional[_Segments]:
    """Return the segments of a pair of blocks, cached for all layers; None if there are none."""
    if layout_q.is_fixed:
        lengths = layout_q.table(padded_segments, layout_k)
        return _Segments(len(lengths[0]) - 1, None, None, lengths)
    return _present_segments(layout_q.plain, layout_k.plain)


@lru_cache(maxsize=256)
def _present_segments(layout_q: SequenceLayout, layout_k: SequenceLayout) -> Optional[_Segments]:
    present = [i for i, both in enumerate(zip(layout_q.lengths, layout_k.lengths)) if all(both)]
    if not present:
        return None
    (rows_q, cu_q, max_q), (rows_k, cu_k, max_k) = (_side(layout, present) for layout in (layout_q, layout_k))
    return _Segments(len(present), rows_q, rows_k, (cu_q, cu_k, max_q, max_k))


def _side(layout: SequenceLayout, present: list[int]) -> tuple[Optional[Tensor], Tensor, int]:
    lengths, starts = torch.tensor([(layout.lengths[i], layout.starts[i]) for i in present]).T
    ends = lengths.cumsum(0)
    rows = torch.arange(int(ends[-1])) + (starts - ends + lengths).repeat_interleave(lengths)
    cu_seqlens = to_device(torch.nn.functional.pad(ends, (1, 0)).int(), layout.device)
    all_rows = len(rows) == layout.total_tokens
    return None if all_rows else to_device(rows, layout.device), cu_seqlens, int(lengths.max())


def _take(x_TNH: Tensor, rows: Optional[Tensor]) -> Tensor:
    return x_TNH if rows is None else x_TNH[rows]


def _put(x: Tensor, like: Tensor, rows: Optional[Tensor]) -> Tensor:
    return x if rows is None else torch.zeros_like(like).index_copy(0, rows, x)
