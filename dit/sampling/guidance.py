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


def guided_pair(network: Network, scale: float, columns: Optional[Tensor] = None) -> Network:
    """Guide with one call per evaluation over the doubled pack [cond; uncond].

    Both halves have the same noised input. At scale 1 do not double: call the network over the conditional pack.

    Args:
        network: bound to a layout followed by itself, conditional samples first.
        scale: anything but 1.
        columns: which of them are guided, bool `[C]`; the others are the conditional half's. None for all.

    Raises:
        ConfigError: the scale is 1, so that half of every call would be wasted.
    """
    if not needs_unconditional(scale):
        raise ConfigError("guidance_scale=1 needs no unconditional half; call the network over the conditional pack")

    def call(inputs_TC: Tensor, time_S: Tensor) -> Tensor:
        cond_TC, uncond_TC = network(torch.cat([inputs_TC, inputs_TC]), torch.cat([time_S, time_S])).chunk(2)
        guided_TC = combine(cond_TC, uncond_TC, scale)
        return guided_TC if columns is None else torch.where(columns.to(cond_TC.device), guided_TC, cond_TC)

    return call


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
    if layout.local_indices is not None:
        raise ConfigError(
            f"dynamic thresholding needs full samples, but this rank has {len(layout.local_indices)} of "
            f"{layout.total_tokens} tokens; sample with context_parallel_size=1 or use static thresholding"
        )
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
