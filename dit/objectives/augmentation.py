"""Noise on the low-resolution picture of a super-resolution model, at a level of its own.

Trained so, a model corrects the errors of the one before it in a cascade. The noise belongs to the small picture: it is
drawn at that size and enlarged with the picture, which is the same as enlarging the noised picture, because bicubic
interpolation is linear.

Source: Ho et al. 2021, arXiv:2106.15282, section 4; Saharia et al. 2022 (Imagen), arXiv:2205.11487, section 2.4; scaled
as EDM's inputs as of NVIDIA NeMo.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.condition_table import AUGMENTATION, LOW_RESOLUTION
from dit.conditions import Condition, per_latent_token, per_sample
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.patchify import patchify_all
from dit.resize import LowResolution


def noised_low_resolution(
    batch: PackedBatch,
    wanted: Sequence[Condition],
    noise: AddressedNoise,
    levels: Optional[Callable[[Tensor], Tensor]],
    scale: Callable[[Tensor], Tensor],
) -> PackedBatch:
    """Return a pack of equally large pictures with noised low-resolution pictures, and the levels of their noise.

    Args:
        wanted: conditions of the model; without `augmentation` among them nothing is done.
        levels: from quantiles to noise levels, to draw them; None to take those of the pack.
        scale: factor on a noised picture at a level.
    """
    by_name = {condition.name: condition for condition in wanted}
    if AUGMENTATION.name not in by_name:
        return batch
    low, made_by = by_name[LOW_RESOLUTION.name], by_name[LOW_RESOLUTION.name].derive
    assert low.shape is not None
    assert isinstance(made_by, LowResolution)
    values_TC = batch.conditions[low.name].values.float()
    if levels is None:
        sigma_S = batch.conditions[AUGMENTATION.name].values.float()
    else:
        sigma_S = levels(noise.uniform_S("augmentation"))
    patch = math.isqrt(values_TC.shape[1] // low.shape[0])
    eps_TC = batch.layout.insert_padding(_enlarged_noise(batch, noise, low.shape[0], patch, made_by))
    sigma_T1 = batch.layout.per_token(sigma_S)
    noised = {
        low.name: per_latent_token(scale(sigma_T1) * (values_TC + sigma_T1 * eps_TC)),
        AUGMENTATION.name: per_sample(sigma_S),
    }
    return replace(batch, conditions=batch.conditions | noised)


def _enlarged_noise(
    batch: PackedBatch, noise: AddressedNoise, channels: int, patch: int, made_by: LowResolution
) -> Tensor:
    """Draw noise of the small pictures, enlarge it, and return it as tokens without padding `[R, channels patch^2]`."""
    t, h, w = batch.grids[0]
    sides = [-(-n * patch // made_by.factor) for n in (h, w)]
    small = SequenceLayout.from_lengths([t * sides[0] * sides[1]] * len(batch.grids), device=batch.layout.device)
    drawn = AddressedNoise(noise.seed, noise.step, noise.ids_S, small).normal_TC("low resolution", channels)
    pictures_SCTHW = drawn.view(len(batch.grids), t, *sides, channels).permute(0, 4, 1, 2, 3)
    large_SCTHW = made_by.enlarge(pictures_SCTHW)[..., : h * patch, : w * patch]
    return patchify_all(list(torch.unbind(large_SCTHW)), 1, patch)
