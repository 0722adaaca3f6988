"""torch's attention for CPU on all groups of a ragged pack, as one operation of autograd.

A pack of short samples is little work and many calls: what each group's views and copies would cost in autograd, in
every layer, is as much as their attention. Here a projection's rows are copied once, and groups are views of the copy.

    q, k, v [T, N, H]  --rows of all groups-->  [P, N, H]  --group by group-->  [P, N, H]  --back-->  [T, N, H]

Shape suffixes: T tokens, K keys, P slots of all groups, N heads, H head size.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from dit.kernels.segment_groups import Grouped, moved

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def grouped_sdpa(q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, of: Grouped) -> Tensor:
    """Attend inside the segments of a pack; zeros for tokens that attend to nothing.

    Args:
        q_TNH, k_KNH, v_KNH: of as many heads each, on CPU.
        of: the segments.
    """
    out: Tensor = _GroupedSdpa.apply(q_TNH, k_KNH, v_KNH, of)
    return out


class _GroupedSdpa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, of: Grouped) -> Tensor:
        q, k, v = filled((q_TNH, k_KNH, v_KNH), of)
        parts, sums = [], []
        queries, keys, values = _batches(q, of, of.sizes_q), _batches(k, of, of.sizes_k), _batches(v, of, of.sizes_k)
        for group, *block in zip(of.groups, queries, keys, values):
            out, sum_of_exponentials = _FORWARD(*block, attn_mask=group.mask)
            parts.append(out.transpose(1, 2))
            sums.append(sum_of_exponentials)
        out_PNH = _joined(parts)
        ctx.of = of
        ctx.save_for_backward(q, k, v, out_PNH, *sums)
        return moved(out_PNH, of.queries.slot_T, of.queries.absent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        of: Grouped = ctx.of
        q, k, v, out, *sums = ctx.saved_tensors
        grad = moved(grads[0], of.queries.token_P, of.queries.idle)
        blocks = [_batches(x, of, of.sizes_q) for x in (grad, q, out)]
        blocks[2:2] = [_batches(x, of, of.sizes_k) for x in (k, v)]
        found = [
            _BACKWARD(*block, lse, 0.0, False, attn_mask=group.mask)
            for group, *block, lse in zip(of.groups, *blocks, sums)
        ]
        slots = of.queries, of.keys, of.keys
        parts = (_joined([x.transpose(1, 2) for x in one]) for one in zip(*found))
        return *(moved(x, own.slot_T, own.absent) for x, own in zip(parts, slots)), None


def filled(parts: Sequence[Tensor], of: Grouped) -> list[Tensor]:
    """Return queries, keys and values in their slots; rows that they share are copied once."""
    first, width = min(parts, key=lambda x: x.storage_offset()), row_width(parts)
    if of.keys is not of.queries or width is None:
        return [moved(x, slots.token_P, None) for x, slots in zip(parts, (of.queries, of.keys, of.keys))]
    start = first.storage_offset()
    rows_PW = first.as_strided((len(first), width), (width, 1), start).index_select(0, of.queries.token_P)
    return [rows_PW.as_strided((len(rows_PW), *x.shape[1:]), x.stride(), x.storage_offset() - start) for x in parts]


def row_width(parts: Sequence[Tensor]) -> Optional[int]:
    """Return the width of the rows of one tensor that these are all features of; None if there is none.

    Queries, keys and values are, where they are views of their projection.
    """
    first = parts[0]
    start, width = min(x.storage_offset() for x in parts), first.stride(0)
    for x in parts:
        last = x.storage_offset() - start + sum((n - 1) * step for n, step in zip(x.shape[1:], x.stride()[1:]))
        in_rows = last < x.stride(0) == width and x.stride(-1) == 1
        if not in_rows or x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    return width if sum(x.shape[1:].numel() for x in parts) == width else None


def _batches(x_PNH: Tensor, of: Grouped, sizes: Sequence[int]) -> list[Tensor]:
    """Return the slots of each group as a batch `[count, N, n, H]`."""
    found, at = [], x_PNH.storage_offset()
    row, head, one = x_PNH.stride()
    for group, n in zip(of.groups, sizes):
        shape = group.count, x_PNH.shape[1], n, x_PNH.shape[2]
        found.append(x_PNH.as_strided(shape, (n * row, head, row, one), at))
        at += group.count * n * row
    return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the slots of all groups, `[P, N, H]`, of batches `[count, n, N, H]`."""
    rows = [x.flatten(0, 1) for x in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
