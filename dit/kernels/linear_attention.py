"""Linear attention over packed sequences, whose work and memory are linear in the number of tokens.

With f = ReLU, query i of a sample reads sums over the keys j of the sample:

    out_i = f(q_i) sum_j f(k_j) v_j^T / f(q_i) sum_j f(k_j)

The sums of a sample are one matrix `[H, H + 1]` for each head: a column of ones in the values gives the denominator.
Tensors are THD as in `dit.kernels.attention`; padding is in no sum, and its output is zero. Sums are float32.

Source: Katharopoulos et al. 2020, arXiv:2006.16236; with ReLU, Xie et al. 2024 (SANA), arXiv:2410.10629, section 2.2.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, relu

from dit.kernels.recompute import recomputable
from dit.layout import SequenceLayout

EPSILON = 1e-15


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
        sum_over_ranks: sums `[S, N, H, H + 1]` of the local tokens over all ranks with tokens of the samples.

    Returns:
        `[T, N, H]` in the dtype of `q_TNH`.
    """
    queries, keys = (_segments(_features(x), layout) for x in (q_TNH, k_TNH))
    values = _segments(_with_ones(v_TNH), layout)
    sums = sum_over_ranks(torch.cat([k.mT @ v for k, v in zip(keys, values)]))
    parts = zip(queries, sums.split([len(q) for q in queries]))
    out_RNH = torch.cat([(q @ part).transpose(1, 2).flatten(0, 1) for q, part in parts])
    attended = out_RNH[..., :-1] / (out_RNH[..., -1:] + EPSILON)
    return layout.insert_padding(attended.to(q_TNH.dtype))


def _segments(x_TNH: Tensor, layout: SequenceLayout) -> list[Tensor]:
    """Return views `[samples, N, n, H]` of the real tokens: one of a dense batch, or one for each sample."""
    if layout.uniform_length:
        return [x_TNH.unflatten(0, (layout.num_samples, -1)).transpose(1, 2)]
    spans = zip(layout.starts, layout.lengths)
    return [x_TNH[start : start + length].transpose(0, 1)[None] for start, length in spans]
