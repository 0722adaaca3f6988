"""Attention on CPU to all groups of a ragged pack, as one autograd operation.

A pack of short samples is little work in many calls: with separate autograd operations, the views and copies of each
group would cost as much as attention. Here the heads of a projection are copied once, into rows ordered by group, then
by sample, then by head:

    q, k, v [T, N, H]  --rows of all groups-->  [R, H]  --group by group-->  [R, H]  --back-->  [T, N, H]

Short samples use batched matrix products and save their weights for the backward pass; longer samples use torch's
flash kernel.

Shape suffixes: T tokens, K keys, P slots of all groups, R slots of all groups and heads, N heads, H head size; B
samples times heads of a group, q its queries, k its keys, h the head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from dit.kernels.segment_groups import Group, Grouped, Slots, select_rows

SHORT = 64
"""Up to this number of queries and keys, matrix products are 1.3 to 1.6 times as fast as flash (head size 32)."""

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SOFTMAX_BACKWARD: Any = torch.ops.aten._softmax_backward_data


def grouped_sdpa(q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, groups: Grouped) -> Tensor:
    """Attend inside the segments of a pack; return zeros for tokens without keys.

    Args:
        q_TNH, k_KNH, v_KNH: tensors on CPU with equal numbers of heads.
        groups: the segments.
    """
    out: Tensor = _GroupedSdpa.apply(q_TNH, k_KNH, v_KNH, groups)
    return out


def attended(q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, groups: Grouped) -> tuple[Tensor, Tensor]:
    """Return the attention of `grouped_sdpa` and its log-sum-exp, float32 `[T, N]`, -inf for tokens without keys.

    Builds no autograd graph; `gradients` is the backward pass.
    """
    heads = q_TNH.shape[1]
    rows_q, rows_k = head_rows(groups, heads)
    q, k, v = gathered((q_TNH, k_KNH, v_KNH), rows_q, rows_k)
    out, lse_R1 = torch.empty_like(q), q.new_empty(len(q), 1, dtype=torch.float32)
    for block in _blocks(groups, heads):
        lse = block.forward(q, k, v, out, logs=True)
        block.queries(lse_R1).copy_(lse.reshape(-1, block.group.queries, 1))
    lse_TN = select_rows(lse_R1, rows_q.row_TN, None)
    if rows_q.absent is not None:
        lse_TN.index_fill_(0, rows_q.absent, -torch.inf)
    return rows_q.scatter(out), lse_TN.view(-1, heads)


def gradients(
    grad_TNH: Tensor, parts: Sequence[Tensor], out_TNH: Tensor, lse_TN: Tensor, groups: Grouped
) -> list[Tensor]:
    """Return the gradients of queries, keys and values (`parts`) from the result of `attended`."""
    heads = grad_TNH.shape[1]
    rows_q, rows_k = head_rows(groups, heads)
    q, k, v = gathered(parts, rows_q, rows_k)
    grad, lse_R1 = rows_q.gather(grad_TNH), rows_q.gather(lse_TN[..., None])
    blocks = list(_blocks(groups, heads))
    out = q if all(block.is_short(q) for block in blocks) else rows_q.gather(out_TNH)  # unused for short samples
    return _gradients(groups, heads, grad, (q, k, v, out), [block.log_sums(lse_R1, q) for block in blocks])


def _gradients(
    groups: Grouped, heads: int, grad: Tensor, rows: Sequence[Tensor], saved: Sequence[Tensor]
) -> list[Tensor]:
    rows_q, rows_k = head_rows(groups, heads)
    q, k, v, out = rows
    if rows_q.idle is not None:
        grad.index_fill_(0, rows_q.idle, 0.0)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    for block, block_saved in zip(_blocks(groups, heads), saved):
        block.backward(grad, q, k, v, out, block_saved, grads)
    return [rows.scatter(x) for rows, x in zip((rows_q, rows_k, rows_k), grads)]


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Mapping between the heads of the tokens and the rows of all groups; see `Slots`.

    Attributes:
        heads: number of heads.
        token_R, head_R: token and head of each row, int64.
        idle: rows without a token, or None.
        row_TN: row of each head of each token, int64 `[T * N]`.
        absent: indices in `[T * N]` of the heads of tokens without keys, or None.
        tables: cache of row indices in a projection, shared by all layers.
    """

    heads: int
    token_R: Tensor
    head_R: Tensor
    idle: Optional[Tensor]
    row_TN: Tensor
    absent: Optional[Tensor]
    tables: dict[object, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(slots: Slots, groups: Sequence[Group], sizes: Sequence[int], heads: int) -> "HeadRows":
        """Return the rows of `heads` heads; `sizes` are the slots of a segment of each group."""
        indices, start, head_N = [], 0, torch.arange(heads)
        for group, n in zip(groups, sizes):
            slot = torch.arange(start, start + group.count * n).view(group.count, 1, n)
            indices.append((slot * heads + head_N[:, None]).flatten())
            start += group.count * n
        index_R = torch.cat(indices)  # slot * heads + head
        row_of_index = index_R.argsort()

        def all_heads(slots_X: Optional[Tensor]) -> Optional[Tensor]:
            return None if slots_X is None else (slots_X[:, None] * heads + head_N).flatten()

        idle = all_heads(slots.idle)
        slot_R = index_R // heads
        return HeadRows(
            heads,
            slots.token_P[slot_R],
            index_R - slot_R * heads,
            None if idle is None else row_of_index[idle],
            row_of_index[all_heads(slots.slot_T)],
            all_heads(slots.absent),
        )

    def gather(self, x_TNH: Tensor) -> Tensor:
        """Copy the heads of the tokens into their rows: `[T, N, H]` becomes `[R, H]`."""
        return x_TNH.reshape(-1, x_TNH.shape[-1]).index_select(0, self.of_projection(self.heads, ((0, 1),)))

    def of_projection(self, width: int, parts: tuple[tuple[int, int], ...]) -> Tensor:
        """Return the index of each row in a projection, concatenated over its parts, `[parts * R]`.

        Args:
            width: width of the projection in heads.
            parts: first head and stride, in heads, of each part (queries, keys, values).
        """
        if (width, parts) not in self.tables:
            indices = [self.token_R * width + first + self.head_R * step for first, step in parts]
            self.tables[width, parts] = torch.cat(indices)
        return self.tables[width, parts]

    def scatter(self, x_RH: Tensor) -> Tensor:
        """Copy the rows back: `[R, H]` becomes `[T, N, H]`, with zeros for tokens without keys."""
        return select_rows(x_RH, self.row_TN, self.absent).view(-1, self.heads, x_RH.shape[-1])


def head_rows(groups: Grouped, heads: int) -> tuple[HeadRows, HeadRows]:
    """Return the rows of queries and of keys, computed once for all layers."""
    rows = groups.tables.get(heads)
    if rows is None:
        queries = HeadRows.of(groups.queries, groups.groups, groups.sizes_q, heads)
        same = groups.keys is groups.queries
        rows = queries, queries if same else HeadRows.of(groups.keys, groups.groups, groups.sizes_k, heads)
        groups.tables[heads] = rows
    return rows


class _GroupedSdpa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, groups: Grouped) -> Tensor:
        heads = q_TNH.shape[1]
        rows_q, rows_k = head_rows(groups, heads)
        q, k, v = gathered((q_TNH, k_KNH, v_KNH), rows_q, rows_k)
        out = torch.empty_like(q)
        saved = [block.forward(q, k, v, out) for block in _blocks(groups, heads)]
        ctx.groups, ctx.heads = groups, heads
        ctx.save_for_backward(q, k, v, out, *saved)
        return rows_q.scatter(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        q, k, v, out, *saved = ctx.saved_tensors
        grad = head_rows(ctx.groups, ctx.heads)[0].gather(grads[0])
        return *_gradients(ctx.groups, ctx.heads, grad, (q, k, v, out), saved), None


@dataclass(frozen=True)
class _Block:
    """The rows of one group.

    Attributes:
        first_q, first_k: index of the first row of queries and of keys.
    """

    group: Group
    heads: int
    first_q: int
    first_k: int

    def forward(self, q_RH: Tensor, k_RH: Tensor, v_RH: Tensor, out_RH: Tensor, *, logs: bool = False) -> Tensor:
        """Write the output, and return the weights or, with `logs`, the log-sum-exps for the backward pass."""
        out_Bqh, v_Bkh = self.queries(out_RH), self._keys(v_RH)
        if self.is_short(q_RH):
            scores_Bqk = self._scores(q_RH, k_RH)
            weights_Bqk = scores_Bqk.softmax(-1)
            torch.bmm(weights_Bqk, v_Bkh, out=out_Bqh)
            # The largest weight is exp(largest score - log-sum-exp).
            return scores_Bqk.amax(-1) - weights_Bqk.amax(-1).log_() if logs else weights_Bqk
        inputs = self._by_sample(self.queries(q_RH), self._keys(k_RH), v_Bkh)
        out, lse = _FORWARD(*inputs, attn_mask=self.group.mask)
        out_Bqh.view(out.shape).copy_(out)
        log_sums: Tensor = lse
        return log_sums

    def log_sums(self, lse_R1: Tensor, q_RH: Tensor) -> Tensor:
        """Return the result of `forward` with `logs`, from the log-sum-exps of the rows of all groups."""
        lse_Bq = self.queries(lse_R1)[..., 0]
        return lse_Bq if self.is_short(q_RH) else lse_Bq.unflatten(0, (-1, self.heads))

    def _scores(self, q_RH: Tensor, k_RH: Tensor) -> Tensor:
        """Return q k^T / sqrt(H), with -inf for slots without a key."""
        mask = self.group.mask_of(self.heads)
        bias, beta = (q_RH.new_empty(()), 0) if mask is None else (mask, 1)
        k_Bhk, scale = self._keys(k_RH, transposed=True), q_RH.shape[1] ** -0.5
        return torch.baddbmm(bias, self.queries(q_RH), k_Bhk, beta=beta, alpha=scale)

    def backward(
        self,
        grad_RH: Tensor,
        q_RH: Tensor,
        k_RH: Tensor,
        v_RH: Tensor,
        out_RH: Tensor,
        saved: Tensor,
        grads: Sequence[Tensor],
    ) -> None:
        """Write the gradients of queries, keys and values into `grads`; `saved` is the result of `forward`."""
        grad_Bqh, q_Bqh, k_Bkh = self.queries(grad_RH), self.queries(q_RH), self._keys(k_RH)
        dq_Bqh, dk_Bkh, dv_Bkh = self.queries(grads[0]), self._keys(grads[1]), self._keys(grads[2])
        if self.is_short(q_RH):
            if saved.dim() == 2:
                saved = self._scores(q_RH, k_RH).sub_(saved[..., None]).exp_()
            scale = q_RH.shape[1] ** -0.5
            dweights_Bqk = torch.bmm(grad_Bqh, self._keys(v_RH, transposed=True))
            dscores_Bqk = _SOFTMAX_BACKWARD(dweights_Bqk, saved, -1, saved.dtype)
            torch.baddbmm(q_Bqh, dscores_Bqk, k_Bkh, beta=0, alpha=scale, out=dq_Bqh)
            torch.baddbmm(k_Bkh, dscores_Bqk.mT, q_Bqh, beta=0, alpha=scale, out=dk_Bkh)
            torch.bmm(saved.mT, grad_Bqh, out=dv_Bkh)
            return
        inputs = self._by_sample(grad_Bqh, q_Bqh, k_Bkh, self._keys(v_RH), self.queries(out_RH))
        values = _BACKWARD(*inputs, saved, 0.0, False, attn_mask=self.group.mask)
        for target, value in zip((dq_Bqh, dk_Bkh, dv_Bkh), values):
            target.view(value.shape).copy_(value)

    def is_short(self, x: Tensor) -> bool:
        """Return whether the group uses matrix products, which would round the weights in half precision."""
        return max(self.group.queries, self.group.keys) <= SHORT and x.dtype in (torch.float32, torch.float64)

    def _by_sample(self, *parts: Tensor) -> list[Tensor]:
        return [x.unflatten(0, (-1, self.heads)) for x in parts]

    def queries(self, x_RH: Tensor) -> Tensor:
        """Return `[B, q, h]`."""
        return self._part(x_RH, self.first_q, self.group.queries)

    def _keys(self, x_RH: Tensor, *, transposed: bool = False) -> Tensor:
        """Return `[B, k, h]`, or `[B, h, k]`."""
        return self._part(x_RH, self.first_k, self.group.keys, transposed=transposed)

    def _part(self, x_RH: Tensor, first: int, n: int, *, transposed: bool = False) -> Tensor:
        batch, size = self.group.count * self.heads, x_RH.shape[1]
        (rows, columns), steps = ((size, n), (1, size)) if transposed else ((n, size), (size, 1))
        return x_RH.as_strided((batch, rows, columns), (n * size, *steps), x_RH.storage_offset() + first * size)


def _blocks(groups: Grouped, heads: int) -> Iterator[_Block]:
    first_q = first_k = 0
    for group in groups.groups:
        yield _Block(group, heads, first_q, first_k)
        first_q += group.count * heads * group.queries
        first_k += group.count * heads * group.keys


def gathered(parts: Sequence[Tensor], rows_q: HeadRows, rows_k: HeadRows) -> Sequence[Tensor]:
    """Return queries, keys and values in their rows; views of one projection are copied in one call."""
    size, width = parts[0].shape[-1], row_width(parts)
    start = min(x.storage_offset() for x in parts)
    places = [(x.storage_offset() - start, x.stride(1)) for x in parts]
    if rows_k is not rows_q or width is None or any(number % size for number in (width, *sum(places, ()))):
        return [rows.gather(x) for x, rows in zip(parts, (rows_q, rows_k, rows_k))]
    projection = parts[0].as_strided((len(parts[0]) * width // size, size), (size, 1), start)
    units = tuple((offset // size, step // size) for offset, step in places)
    return projection.index_select(0, rows_q.of_projection(width // size, units)).unflatten(0, (3, -1)).unbind()


def row_width(parts: Sequence[Tensor]) -> Optional[int]:
    """Return the width of the projection if the parts are views that together cover its features, else None."""
    first = parts[0]
    start, width = min(x.storage_offset() for x in parts), first.stride(0)
    for x in parts:
        last = x.storage_offset() - start + sum((n - 1) * step for n, step in zip(x.shape[1:], x.stride()[1:]))
        in_rows = last < x.stride(0) == width and x.stride(-1) == 1
        if not in_rows or x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    return width if sum(x.shape[1:].numel() for x in parts) == width else None
