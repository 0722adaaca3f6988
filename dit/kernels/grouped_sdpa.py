"""Attention on CPU to all groups of a ragged pack, as one operation of autograd.

A pack of short samples is little work and many calls: what each group's views and copies would cost in autograd, in
every layer, is as much as their attention. Here the heads of a projection are copied once, as rows that lie group by
group, and in a group sample by sample and head by head:

    q, k, v [T, N, H]  --rows of all groups-->  [R, H]  --group by group-->  [R, H]  --back-->  [T, N, H]

Short samples take batched matrix products, and save their weights for the backward pass; longer ones torch's flash
kernel, which takes them sample by sample.

Shape suffixes: T tokens, K keys, P slots of all groups, R slots of all groups and heads, N heads, H head size; B
samples times heads of a group, q its queries, k its keys, h the head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from dit.kernels.segment_groups import Group, Grouped, Slots, moved

SHORT = 64
"""Up to so many queries and keys, matrix products are faster than the flash kernel, 1.3 to 1.6 times (head size 32)."""

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SOFTMAX_BACKWARD: Any = torch.ops.aten._softmax_backward_data


def grouped_sdpa(q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, of: Grouped) -> Tensor:
    """Attend inside the segments of a pack; zeros for tokens that attend to nothing.

    Args:
        q_TNH, k_KNH, v_KNH: of as many heads each, on CPU.
        of: the segments.
    """
    out: Tensor = _GroupedSdpa.apply(q_TNH, k_KNH, v_KNH, of)
    return out


def attended(q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, of: Grouped) -> tuple[Tensor, Tensor]:
    """Return the attention of `grouped_sdpa` and its log-sum-exp, float32 `[T, N]`, -inf where nothing is attended to.

    No graph is made: `gradients` is the backward pass.
    """
    heads = q_TNH.shape[1]
    rows_q, rows_k = head_rows(of, heads)
    q, k, v = filled((q_TNH, k_KNH, v_KNH), rows_q, rows_k)
    out, lse_R1 = torch.empty_like(q), q.new_empty(len(q), 1, dtype=torch.float32)
    for block in _blocks(of, heads):
        lse = block.forward(q, k, v, out, logs=True)
        block.queries(lse_R1).copy_(lse.reshape(-1, block.group.queries, 1))
    lse_TN = moved(lse_R1, rows_q.row_TN, None)
    if rows_q.absent is not None:
        lse_TN.index_fill_(0, rows_q.absent, -torch.inf)
    return rows_q.empty(out), lse_TN.view(-1, heads)


def gradients(grad_TNH: Tensor, parts: Sequence[Tensor], out_TNH: Tensor, lse_TN: Tensor, of: Grouped) -> list[Tensor]:
    """Return the gradients of queries, keys and values, `parts`, from what `attended` returned."""
    heads = grad_TNH.shape[1]
    rows_q, rows_k = head_rows(of, heads)
    q, k, v = filled(parts, rows_q, rows_k)
    grad, lse_R1 = rows_q.fill(grad_TNH), rows_q.fill(lse_TN[..., None])
    blocks = list(_blocks(of, heads))
    out = q if all(block.is_short(q) for block in blocks) else rows_q.fill(out_TNH)  # short ones do not need it
    return _gradients(of, heads, grad, (q, k, v, out), [block.log_sums(lse_R1, q) for block in blocks])


def _gradients(of: Grouped, heads: int, grad: Tensor, rows: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor]:
    rows_q, rows_k = head_rows(of, heads)
    q, k, v, out = rows
    if rows_q.idle is not None:
        grad.index_fill_(0, rows_q.idle, 0.0)
    found = [torch.empty_like(x) for x in (q, k, v)]
    for block, own in zip(_blocks(of, heads), saved):
        block.backward(grad, q, k, v, out, own, found)
    return [own.empty(x) for own, x in zip((rows_q, rows_k, rows_k), found)]


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Where the heads of the tokens lie in the rows of all groups; see `Slots`.

    Attributes:
        heads: how many there are.
        token_R, head_R: of each row, int64.
        idle: rows that hold no token; None if all do.
        row_TN: of each head of each token, int64 `[T * N]`.
        absent: the heads of tokens that attend to nothing, among `[T * N]`; None if there are none.
        tables: rows of a projection, made once for all layers.
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
        found, start, each_N = [], 0, torch.arange(heads)
        for group, n in zip(groups, sizes):
            slot = torch.arange(start, start + group.count * n).view(group.count, 1, n)
            found.append((slot * heads + each_N[:, None]).flatten())
            start += group.count * n
        place_R = torch.cat(found)  # slot * heads + head
        row_of_place = place_R.argsort()

        def all_heads(slots_X: Optional[Tensor]) -> Optional[Tensor]:
            return None if slots_X is None else (slots_X[:, None] * heads + each_N).flatten()

        idle = all_heads(slots.idle)
        slot_R = place_R // heads
        return HeadRows(
            heads,
            slots.token_P[slot_R],
            place_R - slot_R * heads,
            None if idle is None else row_of_place[idle],
            row_of_place[all_heads(slots.slot_T)],
            all_heads(slots.absent),
        )

    def fill(self, x_TNH: Tensor) -> Tensor:
        """Copy the heads of the tokens into their rows: `[T, N, H]` becomes `[R, H]`."""
        return x_TNH.reshape(-1, x_TNH.shape[-1]).index_select(0, self.of_projection(self.heads, ((0, 1),)))

    def of_projection(self, width: int, parts: tuple[tuple[int, int], ...]) -> Tensor:
        """Return which heads of a projection's rows these rows are, one tensor after the other, `[parts * R]`.

        Args:
            width: of the projection's rows, in heads.
            parts: the tensors that are taken from it, in heads: where the first head is, and from one to the next.
        """
        if (width, parts) not in self.tables:
            found = [self.token_R * width + first + self.head_R * step for first, step in parts]
            self.tables[width, parts] = torch.cat(found)
        return self.tables[width, parts]

    def empty(self, x_RH: Tensor) -> Tensor:
        """Copy the rows back: `[R, H]` becomes `[T, N, H]`, zeros where none attends."""
        return moved(x_RH, self.row_TN, self.absent).view(-1, self.heads, x_RH.shape[-1])


def head_rows(of: Grouped, heads: int) -> tuple[HeadRows, HeadRows]:
    """Return the rows of queries and of keys, made once for all layers."""
    known = of.tables.get(heads)
    if known is None:
        queries = HeadRows.of(of.queries, of.groups, of.sizes_q, heads)
        same = of.keys is of.queries
        known = queries, queries if same else HeadRows.of(of.keys, of.groups, of.sizes_k, heads)
        of.tables[heads] = known
    return known


class _GroupedSdpa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, k_KNH: Tensor, v_KNH: Tensor, of: Grouped) -> Tensor:
        heads = q_TNH.shape[1]
        rows_q, rows_k = head_rows(of, heads)
        q, k, v = filled((q_TNH, k_KNH, v_KNH), rows_q, rows_k)
        out = torch.empty_like(q)
        saved = [block.forward(q, k, v, out) for block in _blocks(of, heads)]
        ctx.of, ctx.heads = of, heads
        ctx.save_for_backward(q, k, v, out, *saved)
        return rows_q.empty(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        q, k, v, out, *saved = ctx.saved_tensors
        grad = head_rows(ctx.of, ctx.heads)[0].fill(grads[0])
        return *_gradients(ctx.of, ctx.heads, grad, (q, k, v, out), saved), None


@dataclass(frozen=True)
class _Block:
    """The rows of a group among those of all groups.

    Attributes:
        first_q, first_k: the first of them, of queries and of keys.
    """

    group: Group
    heads: int
    first_q: int
    first_k: int

    def forward(self, q_RH: Tensor, k_RH: Tensor, v_RH: Tensor, out_RH: Tensor, *, logs: bool = False) -> Tensor:
        """Write the output, and return what the backward pass needs besides: weights or, with `logs`, log-sum-exps."""
        out_Bqh, v_Bkh = self.queries(out_RH), self._keys(v_RH)
        if self.is_short(q_RH):
            scores_Bqk = self._scores(q_RH, k_RH)
            weights_Bqk = scores_Bqk.softmax(-1)
            torch.bmm(weights_Bqk, v_Bkh, out=out_Bqh)
            # The largest weight is exp(largest score - log-sum-exp).
            return scores_Bqk.amax(-1) - weights_Bqk.amax(-1).log_() if logs else weights_Bqk
        given = self._by_sample(self.queries(q_RH), self._keys(k_RH), v_Bkh)
        whole, lse = _FORWARD(*given, attn_mask=self.group.mask)
        out_Bqh.view(whole.shape).copy_(whole)
        log_sums: Tensor = lse
        return log_sums

    def log_sums(self, lse_R1: Tensor, q_RH: Tensor) -> Tensor:
        """Return what `forward` returns with `logs`, of the rows of all groups."""
        lse_Bq = self.queries(lse_R1)[..., 0]
        return lse_Bq if self.is_short(q_RH) else lse_Bq.unflatten(0, (-1, self.heads))

    def _scores(self, q_RH: Tensor, k_RH: Tensor) -> Tensor:
        """Return q k^T / sqrt(H), and -inf where a slot holds no key."""
        mask = self.group.mask_of(self.heads)
        added, beta = (q_RH.new_empty(()), 0) if mask is None else (mask, 1)
        turned, scale = self._keys(k_RH, turned=True), q_RH.shape[1] ** -0.5
        return torch.baddbmm(added, self.queries(q_RH), turned, beta=beta, alpha=scale)

    def backward(
        self,
        grad_RH: Tensor,
        q_RH: Tensor,
        k_RH: Tensor,
        v_RH: Tensor,
        out_RH: Tensor,
        saved: Tensor,
        into: Sequence[Tensor],
    ) -> None:
        """Write the gradients of queries, keys and values; `saved` is what `forward` returned."""
        grad_Bqh, q_Bqh, k_Bkh = self.queries(grad_RH), self.queries(q_RH), self._keys(k_RH)
        dq_Bqh, dk_Bkh, dv_Bkh = self.queries(into[0]), self._keys(into[1]), self._keys(into[2])
        if self.is_short(q_RH):
            if saved.dim() == 2:
                saved = self._scores(q_RH, k_RH).sub_(saved[..., None]).exp_()
            scale = q_RH.shape[1] ** -0.5
            of_weights_Bqk = torch.bmm(grad_Bqh, self._keys(v_RH, turned=True))
            of_scores_Bqk = _SOFTMAX_BACKWARD(of_weights_Bqk, saved, -1, saved.dtype)
            torch.baddbmm(q_Bqh, of_scores_Bqk, k_Bkh, beta=0, alpha=scale, out=dq_Bqh)
            torch.baddbmm(k_Bkh, of_scores_Bqk.mT, q_Bqh, beta=0, alpha=scale, out=dk_Bkh)
            torch.bmm(saved.mT, grad_Bqh, out=dv_Bkh)
            return
        given = self._by_sample(grad_Bqh, q_Bqh, k_Bkh, self._keys(v_RH), self.queries(out_RH))
        found = _BACKWARD(*given, saved, 0.0, False, attn_mask=self.group.mask)
        for target, value in zip((dq_Bqh, dk_Bkh, dv_Bkh), found):
            target.view(value.shape).copy_(value)

    def is_short(self, x: Tensor) -> bool:
        """Return whether the group takes matrix products; they would round the weights of half precision."""
        return max(self.group.queries, self.group.keys) <= SHORT and x.dtype in (torch.float32, torch.float64)

    def _by_sample(self, *parts: Tensor) -> list[Tensor]:
        return [x.unflatten(0, (-1, self.heads)) for x in parts]

    def queries(self, x_RH: Tensor) -> Tensor:
        """Return `[B, q, h]`."""
        return self._part(x_RH, self.first_q, self.group.queries)

    def _keys(self, x_RH: Tensor, *, turned: bool = False) -> Tensor:
        """Return `[B, k, h]`, or `[B, h, k]`."""
        return self._part(x_RH, self.first_k, self.group.keys, turned=turned)

    def _part(self, x_RH: Tensor, first: int, n: int, *, turned: bool = False) -> Tensor:
        batch, size = self.group.count * self.heads, x_RH.shape[1]
        (rows, columns), steps = ((size, n), (1, size)) if turned else ((n, size), (size, 1))
        return x_RH.as_strided((batch, rows, columns), (n * size, *steps), x_RH.storage_offset() + first * size)


def _blocks(of: Grouped, heads: int) -> Iterator[_Block]:
    first_q = first_k = 0
    for group in of.groups:
        yield _Block(group, heads, first_q, first_k)
        first_q += group.count * heads * group.queries
        first_k += group.count * heads * group.keys


def filled(parts: Sequence[Tensor], rows_q: HeadRows, rows_k: HeadRows) -> Sequence[Tensor]:
    """Return queries, keys and values in their rows; from one tensor they are copied at once."""
    size, width = parts[0].shape[-1], row_width(parts)
    start = min(x.storage_offset() for x in parts)
    places = [(x.storage_offset() - start, x.stride(1)) for x in parts]
    if rows_k is not rows_q or width is None or any(number % size for number in (width, *sum(places, ()))):
        return [rows.fill(x) for x, rows in zip(parts, (rows_q, rows_k, rows_k))]
    one = parts[0].as_strided((len(parts[0]) * width // size, size), (size, 1), start)
    units = tuple((offset // size, step // size) for offset, step in places)
    return one.index_select(0, rows_q.of_projection(width // size, units)).unflatten(0, (3, -1)).unbind()


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
