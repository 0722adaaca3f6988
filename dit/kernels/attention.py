"""Bidirectional attention over packed sequences: an fp32 reference and several kernels with the same signature.

Tensors are THD: `[T, N, H]` tokens, heads, head size. Keys and values `[K, N, H]` may have fewer heads, each shared by
a group of query heads. Segment i of the queries attends only to segment i of the keys. Padding belongs to no segment,
and its output is zero. Two samples a, b with texts p, q (`.` is padding):

    queries  a0 a1 a2 .  b0 b1 b2 b3          keys  p0 p1 . q0
    mask     a0 a1 a2 attend to p0 p1         b0 b1 b2 b3 attend to q0
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention as sdpa

from dit.kernels.segment_groups import groups_of
from dit.layout import SequenceLayout

Attention = Callable[[Tensor, Tensor, Tensor, SequenceLayout, SequenceLayout], Tensor]
MOST_SEGMENTS = 65535
"""Segments of one call: CUDA's limit for the dimensions y and z of a grid, in which attention kernels count them."""
MOST_SUMS = 2**31
"""Sums of dq in one call (`count_sums`), which FlashAttention up to 2.8.3 numbers with 32 bits.

Source: `dq_accum` in flash_api.cpp and flash_bwd_preprocess_kernel.h of Dao-AILab/flash-attention 2.8.3, which its pull
request 2260 corrects.
"""


def reference_attention(
    q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, layout_q: SequenceLayout, layout_k: SequenceLayout
) -> Tensor:
    """Compute softmax(q k^T / sqrt(H)) v with an explicit segment mask in float32, for any device."""
    full_q, full_k = layout_q.gathered, layout_k.gathered
    same = full_q.segment_ids_T[:, None] == full_k.segment_ids_T[None, :]
    mask = same & full_q.valid_T[:, None] & full_k.valid_T[None, :]
    scores = torch.einsum("tnh,knh->ntk", q_TNH.float(), k_KNH.float()) * q_TNH.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("ntk,knh->tnh", weights, v_KNH.float()).to(q_TNH.dtype)


def nothing_attends(layout_q: SequenceLayout, layout_k: SequenceLayout) -> bool:
    """Return whether no segment has both queries and keys, as on a context-parallel rank with only padding."""
    return not layout_q.is_fixed and not any(map(min, layout_q.lengths, layout_k.lengths))


def zeros_of(q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor) -> Tensor:
    """Return zeros (even for NaN inputs) with an autograd graph to q, k and v, for queries without keys.

    Without the graph the projections would get no gradient on this rank, and data parallelism with overlapped
    reductions (and FSDP) would wait for it forever.
    """
    everywhere = torch.ones((), dtype=torch.bool, device=q_TNH.device)
    zero_q, zero_k, zero_v = (x.masked_fill(everywhere, 0.0) for x in (q_TNH, k_KNH, v_KNH))
    return zero_q + zero_k.sum() + zero_v.sum()


def segment_sdpa(
    q_TNH: Tensor,
    k_KNH: Tensor,
    v_KNH: Tensor,
    layout_q: SequenceLayout,
    layout_k: SequenceLayout,
    *,
    same_TK: Optional[Tensor] = None,
) -> Tensor:
    """Run scaled-dot-product attention on groups of segments of equal length, each group as one dense batch.

    Runs on every device of torch. A dense batch needs one call and no copy of the tokens.

    Args:
        same_TK: for packs of fixed size, whether a query and a key are in one segment; None for segments that are
            samples.
    """
    kernel = partial(sdpa, enable_gqa=q_TNH.shape[1] != k_KNH.shape[1])
    return attend_densely(kernel, q_TNH, k_KNH, v_KNH, layout_q, layout_k, same_TK)


def attend_densely(
    kernel: Callable[..., Tensor],
    q_TNH: Tensor,
    k_KNH: Tensor,
    v_KNH: Tensor,
    layout_q: SequenceLayout,
    layout_k: SequenceLayout,
    same_TK: Optional[Tensor] = None,
) -> Tensor:
    """Run a dense kernel on groups of segments of equal length, each group as one batch; see `segment_sdpa`.

    For packs of fixed size, it computes scores between all samples. Kernels for packed segments do not.
    """
    layout_q, layout_k = layout_q.gathered, layout_k.gathered
    if layout_q.uniform_length and layout_k.uniform_length:
        return _dense(kernel, q_TNH, k_KNH, v_KNH, layout_q.num_samples)
    if layout_q.is_fixed:  # the pack as one segment, with a mask, whose shape does not depend on lengths
        if same_TK is None:
            same_TK = layout_q.segment_ids_T[:, None] == layout_k.segment_ids_T
        mask_TK = same_TK & layout_q.valid_T[:, None] & layout_k.valid_T
        nothing_T1 = ~mask_TK.any(1, keepdim=True)
        # Padding attends to everything, because a softmax of nothing may be NaN; its result is replaced.
        out_TNH = _dense(partial(kernel, attn_mask=mask_TK | nothing_T1), q_TNH, k_KNH, v_KNH, 1)
        return out_TNH.masked_fill(nothing_T1[..., None], 0.0)
    if nothing_attends(layout_q, layout_k):
        return zeros_of(q_TNH, k_KNH, v_KNH)
    groups = layout_q.table(groups_of, layout_k)
    parts = zip(groups.queries.gather(q_TNH), groups.keys.gather(k_KNH), groups.keys.gather(v_KNH), groups.counts)
    with without_cudnn():
        return groups.queries.scatter([_dense(kernel, q, k, v, count) for q, k, v, count in parts])


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Exclude cuDNN from the kernels that torch selects from, for batches whose sizes differ from pack to pack.

    Torch prefers cuDNN on H100 and B200, and cuDNN takes about a second for each new size: modelscope/FunASR#3704.
    `sdpa_kernel` without flash attention is a request for another kernel, and is respected.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and not torch.backends.cuda.flash_sdp_enabled())
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class _OneKey(torch.autograd.Function):
    """Attention of one query of each segment to one key: the softmax of one score is 1, so the output is the value.

    The temporal attention of single frames would otherwise allocate 128 sums of dq for each feature of a token.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.shapes = q.shape, k.shape
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        dq, dk = (grads[0].new_zeros(shape) for shape in ctx.shapes)
        return dq, dk, grads[0].unflatten(1, (dk.shape[1], -1)).sum(2)


def _dense(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, batch: int) -> Tensor:
    """Attend inside `batch` segments of equal length; return `[batch * n, N, H]`."""
    if len(q) == len(k) == batch:
        one: Tensor = _OneKey.apply(q, k, v)
        return one
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
    if batch > (most := _most_segments(*q.shape[1:])):
        parts = zip(*(x.split(most) for x in (q, k, v)))
        return torch.cat([kernel(*part).transpose(1, 2).flatten(0, 1) for part in parts])
    return kernel(q, k, v).transpose(1, 2).flatten(0, 1)


def _most_segments(heads: int, queries: int, features: int) -> int:
    """Return the largest number of segments that a kernel supports in one call, at least 1."""
    return max(1, min(MOST_SEGMENTS, MOST_SUMS // count_sums(heads, queries, features)))


def count_sums(heads: int, queries: int, features: int, segments: int = 0) -> int:
    """Return the number of sums of dq for a segment or a pack: queries are rounded up to 128, features to 64.

    Args:
        segments: number of segments of a pack, each of which has 128 more queries; 0 for one segment.
    """
    return heads * (-(-queries // 128) + segments) * 128 * (-(-features // 64) * 64)


def varlen_attention(
    q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, layout_q: SequenceLayout, layout_k: SequenceLayout
) -> Tensor:
    """Run torch's varlen kernel (CUDA, half precision) on ragged packs, and `segment_sdpa` on dense packs."""
    from torch.nn.attention.varlen import varlen_attn

    # All versions support grouped queries; since torch 2.12 they must be enabled.
    grouped = q_TNH.shape[1] != k_KNH.shape[1] and "enable_gqa" in signature(varlen_attn).parameters
    kernel = partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn
    return _packed(kernel, q_TNH, k_KNH, v_KNH, layout_q.gathered, layout_k.gathered)


def torch_flash(version: str) -> Callable[[], Attention]:
    """Return a function that makes torch call FlashAttention 3 or 4, in `varlen_attention` and everywhere else.

    Ring attention and the attention of dense packs call the same operators of torch, so they use it too.

    Args:
        version: torch's name, `FA3` or `FA4`.
    """

    def load() -> Attention:
        activate_flash_attention_impl(version)
        return varlen_attention

    return load


def flash_attention(
    q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, layout_q: SequenceLayout, layout_k: SequenceLayout
) -> Tensor:
    """Run flash-attn's varlen kernel on ragged packs, and `segment_sdpa` on dense packs."""
    from flash_attn import flash_attn_varlen_func

    # The default backward pass adds with atomics. torch's kernels check the deterministic mode themselves.
    kernel = partial(flash_attn_varlen_func, deterministic=torch.are_deterministic_algorithms_enabled())
    return _packed(kernel, q_TNH, k_KNH, v_KNH, layout_q.gathered, layout_k.gathered)


def _packed(
    kernel: Callable[..., Any],
    q_TNH: Tensor,
    k_KNH: Tensor,
    v_KNH: Tensor,
    layout_q: SequenceLayout,
    layout_k: SequenceLayout,
) -> Tensor:
    """Call a kernel for packed segments.

    `segment_sdpa` computes dense batches, packs of mostly single tokens, and packs that the kernel does not support.
    """
    # In temporal attention, the columns of stills are single tokens, which need no kernel (`_OneKey`).
    mostly_single = (
        layout_q is layout_k and not layout_q.is_fixed and 2 * layout_q.lengths.count(1) > layout_q.num_samples
    )
    if mostly_single or (layout_q.uniform_length and layout_k.uniform_length):
        return segment_sdpa(q_TNH, k_KNH, v_KNH, layout_q, layout_k)
    if nothing_attends(layout_q, layout_k):  # kernels may not support zero queries
        return zeros_of(q_TNH, k_KNH, v_KNH)
    cu_q, cu_k, max_q, max_k = _segments_with_padding(layout_q, layout_k)
    (tokens, heads, features), segments = q_TNH.shape, len(cu_q) - 1
    if segments > MOST_SEGMENTS or count_sums(heads, tokens, features, segments) > MOST_SUMS:
        return segment_sdpa(q_TNH, k_KNH, v_KNH, layout_q, layout_k)
    return kernel(q_TNH, k_KNH, v_KNH, cu_q, cu_k, max_q, max_k)


def _segments_with_padding(layout_q: SequenceLayout, layout_k: SequenceLayout) -> tuple[Tensor, Tensor, int, int]:
    """Return segments that cover all tokens; padding forms segments of queries without keys or keys without queries.

    A kernel writes zeros for such queries, and zeros as the gradients of such keys, so padding requires neither a copy
    of the tokens nor a host sync. Samples a, b with texts p, q (`.` is padding):

        queries   a0 a1 a2 | .  |   | b0 b1 b2 b3 |  |           keys  p0 p1 |  | . | q0 |  |
        lengths   3          1    0   4             0  0               2       0  1   1    0  0

    Returns:
        Cumulative lengths of queries and of keys, int32 `[3 S + 1]`, and the longest of each.
    """
    if not layout_q.has_padding and not layout_k.has_padding:
        return layout_q.cu_seqlens, layout_k.cu_seqlens, layout_q.max_seqlen, layout_k.max_seqlen
    return layout_q.table(padded_segments, layout_k)


def padded_segments(layout_q: SequenceLayout, layout_k: SequenceLayout) -> tuple[Tensor, Tensor, int, int]:
    """Return the segments of `_segments_with_padding` if there is padding, for `SequenceLayout.table`."""
    lengths: tuple[list[int], list[int]] = [], []
    for i, layout in enumerate((layout_q, layout_k)):
        ends = (*layout.starts[1:], layout.total_tokens)
        for start, length, end in zip(layout.starts, layout.lengths, ends):
            padding = end - start - length
            lengths[i].extend([length, 0, padding] if i else [length, padding, 0])
    cu_q, cu_k = (layout_q.tensor((0, *accumulate(x)), torch.int32) for x in lengths)
    # If no segment has 2 queries, FlashAttention 2 with shared key heads expects 1 in each (its issue 1537).
    max_q, max_k = (x.max_seqlen if x.is_fixed else max(2, *n) for x, n in zip((layout_q, layout_k), lengths))
    return cu_q, cu_k, max_q, max_k
