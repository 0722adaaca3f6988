"""Classifier-free guidance and thresholding, as combinators around networks and denoisers.

A denoiser is affine in the network's output at a fixed input, and so is guidance; it may therefore be applied to the
raw outputs of two network calls, to one call over a doubled pack, or to two clean estimates, with the same result.

The scale is the classic one: 1 is no guidance, 0 is unconditional. (NeMo writes cond + g (cond - uncond); its g is
this scale minus 1.) A negative prompt is the text of the unconditional branch, in place of the empty one.

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
from dit.objectives.base import Network

Branch = Callable[[Tensor, Tensor], Tensor]
"""A `Network` (inputs_TC, time_S) or a denoiser (x_TC, u)."""


def needs_unconditional(scale: float) -> bool:
    """Return whether guidance at this scale uses the unconditional branch."""
    return scale != 1


def combine(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """Return uncond + scale * (cond - uncond)."""
    return uncond + scale * (cond - uncond)


def guided(cond: Branch, uncond: Branch, scale: float) -> Branch:
    """Guide one branch by another; at scale 1 this is `cond` itself and `uncond` is never called.

    Args:
        cond: network or denoiser with the caption or class.
        uncond: the same without it, or with the negative prompt.
        scale: 1 for none.
    """
    if not needs_unconditional(scale):
        return cond
    return lambda x_TC, level: combine(cond(x_TC, level), uncond(x_TC, level), scale)


def guided_columns(num_channels: int, num_positions: int, num_outputs: int, first: Optional[int]) -> Optional[Tensor]:
    """Return which columns of a prediction are guided, bool `[C]`; None for all.

        (mean mean mean mean)(mean mean mean mean)(var ...)     4 channels, 2 positions in a patch
          1    1    1    0     1    1    1    0     0 ...       first=3

    Args:
        num_channels: of a latent.
        num_positions: of a patch.
        num_outputs: of each channel; those behind the mean, such as a variance, are the conditional branch's.
        first: channels of the mean that are guided, None for all.

    Raises:
        ConfigError: there are not so many channels.

    Source: facebookresearch/DiT, `forward_with_cfg`, which guides 3 channels of 4.
    """
    if first is not None and not 1 <= first <= num_channels:
        raise ConfigError(f"guidance_channels={first} of latents with {num_channels} channels; use 1 to {num_channels}")
    if num_outputs == 1 and first in (None, num_channels):
        return None
    mean = (torch.arange(num_channels) < (num_channels if first is None else first)).repeat(num_positions)
    return torch.cat([mean, torch.zeros((num_outputs - 1) * len(mean), dtype=torch.bool)])


def rescaled(guided_TC: Tensor, cond_TC: Tensor, share: float, layout: SequenceLayout) -> Tensor:
    """Scale a share of each sample's guided prediction to the standard deviation of the conditional one.

    Args:
        share: phi; 0 for none.

    Raises:
        ConfigError: this rank has only a part of the tokens.

    Source: Lin et al. 2023, arXiv:2305.08891, Eq. 14 to 16.
    """
    _check_full(layout, "guidance_rescale", "use guidance_rescale=0")

    def deviation_S(x_TC: Tensor) -> Tensor:
        counts_S = layout.sum_per_sample(torch.ones_like(x_TC[:, 0])) * x_TC.shape[1]
        mean_S = layout.sum_per_sample(x_TC.sum(1)) / counts_S
        return (layout.sum_per_sample((x_TC - layout.per_token(mean_S)).square().sum(1)) / counts_S).sqrt()

    ratio_S = deviation_S(cond_TC) / deviation_S(guided_TC).clamp(min=torch.finfo(guided_TC.dtype).tiny)
    return guided_TC * layout.per_token(share * ratio_S + 1 - share)


def guided_prediction(
    cond_TC: Tensor,
    uncond_TC: Tensor,
    scale: float,
    columns: Optional[Tensor] = None,
    rescale: float = 0.0,
    layout: Optional[SequenceLayout] = None,
) -> Tensor:
    """Combine the predictions of two branches.

    Args:
        uncond_TC: of the branch that guidance leads away from.
        columns: which of them are guided, bool `[C]`; the others are the conditional branch's. None for all.
        rescale: share of `rescaled`, over the guided columns.
        layout: of the tokens; needed for `rescale`.
    """
    guided_TC = combine(cond_TC, uncond_TC, scale)
    chosen = slice(None) if columns is None else columns.to(cond_TC.device)
    if rescale:
        assert layout is not None
        guided_TC[:, chosen] = rescaled(guided_TC[:, chosen], cond_TC[:, chosen], rescale, layout)
    return guided_TC if isinstance(chosen, slice) else torch.where(chosen, guided_TC, cond_TC)


def within(interval: Optional[list[float]], alpha: Tensor, sigma: Tensor) -> bool:
    """Return whether samples are guided at a noise level sigma / alpha.

    Args:
        interval: least and largest level; None for all.
        alpha, sigma: scalars.

    Source: Kynkäänniemi et al. 2024, arXiv:2404.07724, Eq. 5.
    """
    return interval is None or interval[0] * float(alpha) <= float(sigma) <= interval[1] * float(alpha)


def guided_pair(
    network: Network, scale: float, combined: Callable[[Tensor, Tensor, float], Tensor] = guided_prediction
) -> Network:
    """Guide with one call per evaluation over the doubled pack [cond; uncond].

    Both halves have the same noised input. At scale 1 do not double: call the network over the conditional pack.

    Args:
        network: bound to a layout followed by itself, conditional samples first.
        scale: anything but 1.
        combined: combines the two halves, as `guided_prediction`.

    Raises:
        ConfigError: the scale is 1, so that half of every call would be wasted.
    """
    if not needs_unconditional(scale):
        raise ConfigError("guidance_scale=1 needs no unconditional half; call the network over the conditional pack")

    def call(inputs_TC: Tensor, time_S: Tensor) -> Tensor:
        cond_TC, uncond_TC = network(torch.cat([inputs_TC, inputs_TC]), torch.cat([time_S, time_S])).chunk(2)
        return combined(cond_TC, uncond_TC, scale)

    return call


def guided_by(
    network: Network, guide: Network, scale: float, combined: Callable[[Tensor, Tensor, float], Tensor]
) -> Network:
    """Guide a network by another one at the same inputs.

    Args:
        guide: that guidance leads away from.
        combined: combines the two predictions, as `guided_prediction`.
    """
    return lambda inputs_TC, time_S: combined(network(inputs_TC, time_S), guide(inputs_TC, time_S), scale)


def _check_full(layout: SequenceLayout, what: str, cure: str) -> None:
    if layout.local_indices is not None:
        raise ConfigError(
            f"{what} needs full samples, but this rank has {len(layout.local_indices)} of {layout.total_tokens} "
            f"tokens; sample with context_parallel_size=1, or {cure}"
        )


def no_threshold(x0_TC: Tensor) -> Tensor:
    """Return the clean estimate as it is."""
    return x0_TC


def static_threshold(x0_TC: Tensor) -> Tensor:
    """Clamp a clean estimate to [-1, 1], the range of pixels."""
    return x0_TC.clamp(-1, 1)


def dynamic_threshold(x0_TC: Tensor, layout: SequenceLayout, quantile: float = 0.995) -> Tensor:
    """Clamp each sample's clean estimate to its own large quantile and divide by it, for pixels at a large scale.

    Samples whose quantile of |x0| stays below 1 are clamped to [-1, 1] only.

    Raises:
        ConfigError: the quantile is not in (0, 1], or this rank has only a part of the tokens.

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, Section 2.3.
    """
    if not 0 < quantile <= 1:
        raise ConfigError(f"quantile={quantile} must be in (0, 1]; Imagen's is 0.995")
    _check_full(layout, "dynamic thresholding", "use static thresholding")
    # kthvalue: torch.quantile refuses more than 2**24 numbers, which one video exceeds.
    limits = []
    for start, length in zip(layout.starts, layout.lengths):
        size = x0_TC[start : start + length].detach().abs().flatten()
        limits.append(size.kthvalue(math.ceil(quantile * len(size))).values.clamp(min=1))
    limit_T1 = layout.per_token(torch.stack(limits))
    return torch.maximum(torch.minimum(x0_TC, limit_T1), -limit_T1) / limit_T1


def threshold(name: str, layout: SequenceLayout) -> Callable[[Tensor], Tensor]:
    """Return the thresholding of clean estimates of a pack.

    Args:
        name: `none`, `static` or `dynamic`.

    Raises:
        ConfigError: the name is unknown.
    """
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "none": no_threshold,
        "static": static_threshold,
        "dynamic": partial(dynamic_threshold, layout=layout),
    }
    if name not in known:
        raise ConfigError(f"thresholding={name!r} is unknown; use one of {', '.join(map(repr, known))}")
    return known[name]
