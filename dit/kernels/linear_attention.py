"""Linear attention over packed sequences, whose work and memory are linear in the number of tokens.

With f = ReLU, query i of a sample reads sums over the keys j of the sample:

    out_i = (f(q_i)^T sum_j f(k_j) v_j^T) / (f(q_i)^T sum_j f(k_j))

The sums of a sample are one matrix `[H, H + 1]` for each head: a column of ones in the values gives the denominator.
Tensors are THD as in `dit.kernels.attention`; padding is in no sum, and its output is zero. Sums are float32.

With one matrix product per sample, shapes depend on the sample lengths. Packs of fixed size need constant shapes, so
they are split into blocks of `ROWS` rows; the number of blocks depends only on the numbers of tokens and samples. With
4 rows (`.` is a row of zeros):

    samples a, b    a0 a1 a2 b0 b1 b2 b3 b4        blocks    a0 a1 a2 . | b0 b1 b2 b3 | b4 . . . | . . . .

Source: Katharopoulos et al. 2020, arXiv:2006.16236; with ReLU, Xie et al. 2024 (SANA), arXiv:2410.10629, section 2.2.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, relu

from dit.kernels.recompute import recomputable
from dit.layout import SequenceLayout

EPSILON = 1e-15
ROWS = 64
"""Rows of a block in packs of fixed size."""


@recomputable
def _features(x_TNH: Tensor) -> Tensor:
    return relu(x_TNH).float()


@recomputable
def _with_ones(v_TNH: Tensor) -> Tensor:
    return pad(v_TNH.float(), (0, 1), value=1.0)


def linear_attention(
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    layout: SequenceLayout,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Attend inside each sample.

    Args:
        layout: layout of the local tokens as a pack; samples may be empty.
        sum_over_ranks: all-reduces the sums `[S, N, H, H + 1]` over all ranks with tokens of the samples.

    Returns:
        `[T, N, H]` in the dtype of `q_TNH`.
    """
    queries_TNH, keys_TNH = (_features(x) for x in (q_TNH, k_TNH))
    inputs = queries_TNH, keys_TNH, _with_ones(v_TNH)
    if layout.is_fixed:
        rows_T, of_sample_SB = layout.table(_blocks)
        q, k, v = (_blocked(x, layout, rows_T, of_sample_SB.shape[1]) for x in inputs)
        sums = sum_over_ranks(torch.einsum("sb,bnij->snij", of_sample_SB, k.mT @ v))
        out = q @ torch.einsum("sb,snij->bnij", of_sample_SB, sums)
        out_TNH = out.transpose(1, 2).flatten(0, 1).index_select(0, rows_T)
    else:
        queries, keys, values = (_segments(x, layout) for x in inputs)
        sums = sum_over_ranks(torch.cat([k.mT @ v for k, v in zip(keys, values)]))
        parts = zip(queries, sums.split([len(q) for q in queries]))
        out_RNH = torch.cat([(q @ part).transpose(1, 2).flatten(0, 1) for q, part in parts])
        out_TNH = layout.insert_padding(out_RNH)
    return (out_TNH[..., :-1] / (out_TNH[..., -1:] + EPSILON)).to(q_TNH.dtype)


def _segments(x_TNH: Tensor, layout: SequenceLayout) -> list[Tensor]:
    """Return views `[samples, N, n, H]` of the real tokens: one of a dense batch, or one for each sample."""
    if layout.uniform_length:
        return [x_TNH.unflatten(0, (layout.num_samples, -1)).transpose(1, 2)]
    spans = zip(layout.starts, layout.lengths)
    return [x_TNH[start : start + length].transpose(0, 1)[None] for start, length in spans]


def _blocks(layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Return the row of each token, int64 `[T]`, and a float32 mask of the blocks of each sample, `[S, B]`."""
    ends_S = pad(layout.cu_seqlens_padded[1:-1], (0, 1), value=layout.total_tokens)
    counts_S = (ends_S - layout.cu_seqlens_padded[:-1] + ROWS - 1) // ROWS
    stops_S1 = counts_S.cumsum(0)[:, None]
    starts_S1 = stops_S1 - counts_S[:, None]
    number_B = torch.arange(layout.num_samples + -(-layout.total_tokens // ROWS), device=layout.device)
    rows_T = ROWS * starts_S1[layout.segment_ids_T, 0] + layout.token_index_T
    return rows_T, ((starts_S1 <= number_B) & (number_B < stops_S1)).float()


def _blocked(x_TNH: Tensor, layout: SequenceLayout, rows_T: Tensor, blocks: int) -> Tensor:
    """Return the real tokens in the rows of blocks, `[B, N, ROWS, H]`."""
    real_TNH = x_TNH.masked_fill(~layout.valid_T[:, None, None], 0.0)
    rows = x_TNH.new_zeros(blocks * ROWS, *x_TNH.shape[1:]).index_copy(0, rows_T, real_TNH)
    return rows.unflatten(0, (blocks, ROWS)).transpose(1, 2)
