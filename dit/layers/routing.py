"""Expert routing inside each sample, independent of the other samples of the pack.

Shape suffixes: E experts of a layer on all ranks, T tokens of the global pack (or the local tokens), S samples.
"""

import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from dit.layout import SequenceLayout, to_device


def expert_capacity(length: int, num_experts: int, capacity_factor: float) -> int:
    """Return the number of tokens of a sample per expert: min(length, ceil(length x capacity factor / experts))."""
    # Exact arithmetic: in floats, 30 x 0.1 is above 3 and would be rounded up to 4.
    exact = Fraction(capacity_factor).limit_denominator(1 << 20) * length / num_experts
    return min(length, math.ceil(exact))


@lru_cache(maxsize=16)
def _slots(
    lengths: tuple[int, ...],
    padded_lengths: tuple[int, ...],
    total_tokens: int,
    device: torch.device,
    num_experts: int,
    capacity_factor: float,
) -> tuple[Tensor, Tensor]:
    """Return indices for a pack that is sorted by sample, then by score, with padding last.

    Returns:
        Sample of each token, where padding counts as one more sample; and indices, in the sorted order, of the first
        tokens of each sample, up to the capacity.
    """
    full = SequenceLayout(lengths, padded_lengths, total_tokens)
    segment_T = torch.where(full.valid_T, full.segment_ids_T, full.num_samples)
    first = 0
    selected: list[Tensor] = []
    for length in lengths:
        selected.append(torch.arange(first, first + expert_capacity(length, num_experts, capacity_factor)))
        first += length
    return to_device(segment_T, device), to_device(torch.cat(selected), device)


def select_tokens(scores_TE: Tensor, layout: SequenceLayout, capacity_factor: float) -> Tensor:
    """Select the tokens with the highest scores for every expert and sample (expert choice).

    Expert e takes the `expert_capacity` tokens of sample s with the highest scores; ties select the earlier token.

    Args:
        scores_TE: scores of all tokens of the global pack; the scores of padding are ignored.

    Returns:
        Whether an expert takes a token, bool `[T, E]`, for the global pack.

    Source: Zhou et al. 2022, arXiv:2202.09368, section 3.2, with the sample in place of the batch.
    """
    num_experts = scores_TE.shape[1]
    segment_T, selected_J = _slots(
        layout.lengths, layout.padded_lengths, layout.total_tokens, scores_TE.device, num_experts, capacity_factor
    )
    # Two stable sorts: each column is ordered by sample, then by descending score, then by token.
    best_TE = scores_TE.detach().argsort(dim=0, descending=True, stable=True)
    by_sample_TE = segment_T[best_TE].argsort(dim=0, stable=True)
    best_TE = best_TE.gather(0, by_sample_TE)
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, best_TE[selected_J], True)


def select_experts(scores_TE: Tensor, valid_T: Tensor, top_k: int) -> Tensor:
    """Select the experts with the highest scores for every real token (token choice); no token is dropped.

    Ties select the expert with the lower index.
    """
    best_TK = scores_TE.detach().argsort(dim=1, descending=True, stable=True)[:, :top_k]
    selected_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, best_TK, True)
    return selected_TE & valid_T[:, None]


def balancing_loss(scores_TE: Tensor, counts_SE: Tensor, layout: SequenceLayout, top_k: int) -> Tensor:
    """Return this rank's part of sum_s n_s L_s, with L_s = E sum_e f_se P_se the balancing loss of sample s.

    f_se is the fraction of the n_s k token-expert pairs of the sample that go to expert e; P_se is the mean score of e
    over its tokens. L_s is 1 for an even load, and E / k if all tokens go to the same k experts. The sum counts
    all real tokens and is divided by the noised tokens of the global batch, like the main loss, so it does not depend
    on packing or layout. The gradient flows through the scores only.

    Args:
        counts_SE: number of tokens of the full sample that each expert takes.

    Source: Fedus et al. 2021, arXiv:2101.03961, Eq. 4-6 (Switch), for k experts as in Zoph et al. 2022,
    arXiv:2202.08906 (ST-MoE). Deviation: both papers average over the tokens of a batch instead of a sample.
    """
    num_experts = scores_TE.shape[1]
    lengths_S1 = layout.lengths_S[:, None].to(scores_TE.dtype)
    share_SE = counts_SE.to(scores_TE.dtype) / (lengths_S1 * top_k)
    return num_experts * (layout.sum_per_sample(scores_TE) * share_SE).sum()
