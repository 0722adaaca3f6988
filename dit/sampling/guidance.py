"""Classifier-free guidance and thresholding.

A denoiser is affine in the network's output at a fixed input, and so is guidance. Guidance of the raw outputs of two
network calls, of one call over a doubled pack, or of two clean estimates therefore has the same result.

A scale of 1 is no guidance, 0 is unconditional. (NeMo writes cond + g (cond - uncond); its g is this scale minus 1.)
A negative prompt replaces the empty text of the unconditional branch.

Source: Ho and Salimans 2022, arXiv:2207.12598, Eq. 6 (their w is this scale minus 1).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Optional

import torch
from torch import Tensor

from dit.errors import ConfigError
from dit.layout import SequenceLayout


def combine(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """Return uncond + scale * (cond - uncond)."""
    return uncond + scale * (cond - uncond)


def guided_columns(num_channels: int, num_positions: int, num_outputs: int, first: Optional[int]) -> Optional[Tensor]:
    """Return which columns of a prediction are guided, bool `[C]`; None for all.

        (mean mean mean mean)(mean mean mean mean)(var ...)     4 channels, 2 positions in a patch
          1    1    1    0     1    1    1    0     0 ...       first=3

    Args:
        num_outputs: per channel; outputs after the mean, such as a variance, are those of the conditional branch.
        first: number of channels of the mean that are guided, None for all.

    Source: facebookresearch/DiT, `forward_with_cfg`, which guides 3 channels of 4.
    """
    if first is not None and first > num_channels:
        raise ConfigError(f"guidance_channels={first}, but latents have {num_channels}; use 1 to {num_channels}")
    if num_outputs == 1 and first in (None, num_channels):
        return None
    mean = (torch.arange(num_channels) < (num_channels if first is None else first)).repeat(num_positions)
    return torch.cat([mean, torch.zeros((num_outputs - 1) * len(mean), dtype=torch.bool)])


def rescaled(guided_TC: Tensor, cond_TC: Tensor, share: float, layout: SequenceLayout) -> Tensor:
    """Interpolate each sample's guided prediction towards one with the standard deviation of the conditional one.

    `share` is phi of the paper. Clean tokens (`dit.levels`), whose predictions have no meaning, do not count.

    Source: Lin et al. 2023, arXiv:2305.08891, Eq. 14 to 16.
    """

    def sum_S(x_TC: Tensor) -> Tensor:
        return layout.sum_per_sample(torch.where(layout.noised_T, x_TC.sum(1), 0.0))

    def deviation_S(x_TC: Tensor) -> Tensor:
        counts_S = sum_S(torch.ones_like(x_TC))
        mean_S = sum_S(x_TC) / counts_S
        return (sum_S((x_TC - layout.per_token(mean_S)).square()) / counts_S).sqrt()

    ratio_S = deviation_S(cond_TC) / deviation_S(guided_TC).clamp(min=torch.finfo(guided_TC.dtype).tiny)
    return guided_TC * layout.per_token(share * ratio_S + 1 - share)


def guided_prediction(
    cond_TC: Tensor,
    uncond_TC: Tensor,
    scale: float,
    columns: Optional[Tensor] = None,
    rescale: float = 0.0,
    layout: Optional[SequenceLayout] = None,
    keep_norm: bool = False,
) -> Tensor:
    """Combine the predictions of two branches.

    Args:
        columns: guided columns, bool `[C]`; the others are those of the conditional branch. None for all.
        rescale: `share` of `rescaled`, over the guided columns; needs `layout`.
        keep_norm: give each token the norm of its conditional prediction, over the guided columns.

    Source of `keep_norm`: diffusers 0.38, `pipeline_qwenimage.py`.
    """
    guided_TC = combine(cond_TC, uncond_TC, scale)
    selection = slice(None) if columns is None else columns.to(cond_TC.device)
    if rescale:
        assert layout is not None
        guided_TC[:, selection] = rescaled(guided_TC[:, selection], cond_TC[:, selection], rescale, layout)
    if keep_norm:
        norm_T1, guided_T1 = (x_TC[:, selection].norm(dim=1, keepdim=True) for x_TC in (cond_TC, guided_TC))
        guided_TC[:, selection] *= norm_T1 / guided_T1.clamp(min=torch.finfo(guided_TC.dtype).tiny)
    return guided_TC if isinstance(selection, slice) else torch.where(selection, guided_TC, cond_TC)


def within(interval: Optional[list[float]], alpha: Tensor, sigma: Tensor) -> bool:
    """Return whether a noise level sigma / alpha is in the interval of levels with guidance; None is all levels.

    Source: Kynkäänniemi et al. 2024, arXiv:2404.07724, Eq. 5.
    """
    return interval is None or interval[0] * float(alpha) <= float(sigma) <= interval[1] * float(alpha)


QUANTILE = 0.995
"""Of |x0| over a sample, in `dynamic_threshold`; Imagen's."""


def dynamic_threshold(x0_TC: Tensor, layout: SequenceLayout) -> Tensor:
    """Clamp each sample's clean estimate to a quantile of |x0| and divide by it, for pixels at a large guidance scale.

    Samples with a quantile below 1 are only clamped to [-1, 1]. Clean tokens do not count in the quantile.

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, Section 2.3.
    """
    # kthvalue: torch.quantile is limited to 2**24 numbers, and one video has more.
    limits, levels = [], layout.levels
    noised_T = None if levels is None else ~levels.layout.per_token(levels.clean_L).flatten()
    for start, length in zip(layout.starts, layout.lengths):
        tokens = slice(start, start + length)
        sample_TC = x0_TC[tokens] if noised_T is None else x0_TC[tokens][noised_T[tokens]]
        size = sample_TC.detach().abs().flatten()
        limits.append(size.kthvalue(math.ceil(QUANTILE * len(size))).values.clamp(min=1))
    limit_T1 = layout.per_token(torch.stack(limits))
    return torch.maximum(torch.minimum(x0_TC, limit_T1), -limit_T1) / limit_T1


def threshold(name: str, layout: SequenceLayout) -> Callable[[Tensor], Tensor]:
    """Return the function of `sampling.thresholding` for the clean estimates of a pack."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda x0_TC: x0_TC,
        "static": lambda x0_TC: x0_TC.clamp(-1, 1),
        "dynamic": partial(dynamic_threshold, layout=layout),
    }
    return functions[name]
