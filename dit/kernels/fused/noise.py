"""Counter-based noise mixed with clean latents in one kernel, without writing the noise to memory."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from dit.kernels.fused.operators import launched_by
from dit.objectives.addressed_noise import LATENT_NOISE, AddressedNoise, Mixture


@launched_by("noise.mix")
def mix_op(
    x0_TC: Tensor,
    segments_T: Tensor,
    token_index_T: Tensor,
    ids_S: Tensor,
    seeds_S: Optional[Tensor],
    pairs_K2S: Tensor,
    key0: int,
    key1: int,
    step: Tensor,
) -> list[Tensor]:
    """Return a x0 + b noise for each of one or two pairs (a, b), float32.

    Args:
        seeds_S: seed of each sample; None if the key contains one seed for the pack.
        step: number of the step, int64, one element.
    """
    return [torch.empty_like(x0_TC, dtype=torch.float32) for _ in range(len(pairs_K2S))]


def mix(noise: AddressedNoise, x0_TC: Tensor, mixtures: Sequence[Mixture], offset_SC: Optional[Tensor]) -> list[Tensor]:
    """Mix latents and noise in one kernel, see `AddressedNoise.mix`."""
    # The kernel has one table for addresses and coefficients, with a row per noise level.
    layout, rows, ids_L = noise.layout, noise.layout.level_layout, noise.layout.per_level(noise.ids_S)
    parts = [_per_level(coefficient, ids_L) for mixture in mixtures for coefficient in mixture]
    pairs_K2L = torch.stack(parts).view(len(mixtures), 2, -1)
    pack_seed, seeds_L = (noise.seed, None) if isinstance(noise.seed, int) else (0, layout.per_level(noise.seed))
    key0, key1 = (int(word) for word in noise.key(LATENT_NOISE, pack_seed))
    indices = rows.segment_ids_T.contiguous(), layout.token_index_T.contiguous()
    addresses = x0_TC.contiguous(), *indices, ids_L.contiguous(), None if seeds_L is None else seeds_L.contiguous()
    # The kernel computes up to two mixtures, such as input and target.
    mixed = [x_TC for two_K2L in pairs_K2L.split(2) for x_TC in mix_op(*addresses, two_K2L, key0, key1, noise.step_1)]
    if offset_SC is None:
        return mixed
    offset_LC = layout.per_level(offset_SC)
    return [x_TC + rows.per_token(b_L[:, None] * offset_LC) for x_TC, b_L in zip(mixed, pairs_K2L[:, 1])]


def _per_level(coefficient: Tensor | float, ids_L: Tensor) -> Tensor:
    if isinstance(coefficient, Tensor):
        return coefficient.float()
    return torch.full(ids_L.shape, coefficient, dtype=torch.float32, device=ids_L.device)
