"""Noise on the low-resolution picture of a super-resolution model, with its own noise level.

A model trained with it corrects the errors of the previous model of a cascade. The noise is drawn at the size of the
small picture and enlarged, which equals enlarging the noised picture, because bicubic interpolation is linear.

Source: Ho et al. 2021, arXiv:2106.15282, section 4; Saharia et al. 2022 (Imagen), arXiv:2205.11487, section 2.4;
scaled like EDM's inputs, as in NVIDIA NeMo.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.condition_table import AUGMENTATION, LOW_RESOLUTION
from dit.conditions import Condition, Entry
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.patchify import patchify_all
from dit.resize import LowResolution


def with_noised_pictures(
    batch: PackedBatch,
    required: Sequence[Condition],
    noise: AddressedNoise,
    level: Optional[Callable[[Tensor], Tensor]],
    scale: Callable[[Tensor], Tensor],
) -> PackedBatch:
    """Return a pack of pictures of one size with noised low-resolution pictures, and their noise levels.

    Args:
        level: maps a quantile to a noise level; None for the levels in the batch.
        scale: maps a noise level to the factor of a noised picture.
    """
    by_name = {condition.name: condition for condition in required}
    if AUGMENTATION.name not in by_name:
        return batch
    low, resize = by_name[LOW_RESOLUTION.name], by_name[LOW_RESOLUTION.name].derive
    assert low.shape is not None
    assert isinstance(resize, LowResolution)
    values_TC = batch.conditions[low.name].values.float()
    sigma_S = level(noise.uniform_S("augmentation")) if level else batch.conditions[AUGMENTATION.name].values.float()
    patch = math.isqrt(values_TC.shape[1] // low.shape[0])
    eps_TC = batch.layout.insert_padding(_enlarged_noise(batch, noise, low.shape[0], patch, resize))
    sigma_T1 = batch.layout.per_token(sigma_S)
    noised = {
        low.name: Entry("latent", scale(sigma_T1) * (values_TC + sigma_T1 * eps_TC)),
        AUGMENTATION.name: Entry("sample", sigma_S),
    }
    return replace(batch, conditions=batch.conditions | noised)


def _enlarged_noise(
    batch: PackedBatch, noise: AddressedNoise, channels: int, patch: int, resize: LowResolution
) -> Tensor:
    """Draw noise for the small pictures, enlarge it, and return its tokens without padding `[R, channels patch^2]`."""
    t, h, w = batch.grids[0]
    sides = [-(-n * patch // resize.factor) for n in (h, w)]
    small = SequenceLayout.from_lengths([t * sides[0] * sides[1]] * len(batch.grids), device=batch.layout.device)
    noise_TC = AddressedNoise(noise.seed, noise.step, noise.ids_S, small).normal_TC("low resolution", channels)
    pictures_SCTHW = noise_TC.view(len(batch.grids), t, *sides, channels).permute(0, 4, 1, 2, 3)
    large_SCTHW = resize.enlarge(pictures_SCTHW)[..., : h * patch, : w * patch]
    return patchify_all(list(torch.unbind(large_SCTHW)), 1, patch)
