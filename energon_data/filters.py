"""Filters of decoded samples. The result depends only on the sample."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor

from dit.condition_table import FPS
from energon_data.samples import Clip, FilteredOutError, SampleError, finite_number

TOO_LONG = "too_long"
"""Reason under which samples with too many tokens are counted."""

MAX_ABS = 1e3
"""Largest valid absolute value of a latent, and of other values per latent token."""


def largest_magnitude(x: Tensor) -> float:
    """Return the largest absolute value of a floating-point tensor: 0 of an empty one, NaN if it has one."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)  # both are NaN if a value is NaN
    return max(-low.item(), high.item())


def check_finite(x: Tensor, what: str, *, limited: bool = True) -> None:
    """Refuse values that are not finite or, if `limited`, larger than `MAX_ABS`."""
    largest = largest_magnitude(x)
    # A NaN fails every comparison, so the comparison must be the one that accepts.
    if not (largest <= MAX_ABS if limited else largest < math.inf):
        bound = f"at most {MAX_ABS:g}" if limited else "finite"
        raise SampleError("not_finite", f"{what} reach {largest:g}, must be {bound}")


@dataclass(frozen=True)
class Limits:
    """Smallest and largest allowed value; None for no limit."""

    low: Optional[float] = None
    high: Optional[float] = None

    def __contains__(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        ends = (("at least", self.low), ("at most", self.high))
        return " and ".join(f"{words} {end:g}" for words, end in ends if end is not None)


def _stated(clip: Clip, *names: str) -> Optional[float]:
    """Return the number under the first of these names in the metadata; None without one."""
    return next((finite_number(clip.metadata, name) for name in names if clip.metadata.get(name) is not None), None)


def _sides(clip: Clip) -> Optional[tuple[float, float]]:
    """Return height and width of the picture in pixels; for a latent, from the metadata."""
    if clip.pixel_shape is not None:
        return float(clip.pixel_shape[1]), float(clip.pixel_shape[2])
    height, width = _stated(clip, "height"), _stated(clip, "width")
    return None if height is None or width is None else (height, width)


def _aspect_ratio(clip: Clip) -> Optional[float]:
    sides = _sides(clip)
    return max(sides) / min(sides) if sides and min(sides) > 0 else None


def _seconds(clip: Clip) -> Optional[float]:
    """Return the duration of a clip; a picture lasts 0 seconds."""
    frames = 1.0
    if clip.pixel_shape is not None:
        frames = clip.pixel_shape[0]
    elif "num_frames" in clip.metadata:
        frames = finite_number(clip.metadata, "num_frames")
    if frames == 1:
        return 0.0
    rate = _stated(clip, *FPS.stored_as)
    return frames / rate if rate is not None and rate > 0 else None


def _caption_length(clip: Clip) -> Optional[float]:
    caption = clip.metadata.get("caption")
    return float(len(caption)) if isinstance(caption, str) else None


MEASURES: dict[str, Callable[[Clip], Optional[float]]] = {
    "aesthetic_score": lambda clip: _stated(clip, "aesthetic_score"),
    "smallest_side": lambda clip: (sides := _sides(clip)) and min(sides),
    "largest_side": lambda clip: (sides := _sides(clip)) and max(sides),
    "aspect_ratio": _aspect_ratio,
    "seconds": _seconds,
    "caption_length": _caption_length,
}
"""Properties that can be limited: a number of a sample before augmentation, or None if it is unknown."""


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Limits of samples.

    Attributes:
        limits: limits by name of a measure; samples without the number are dropped.
        max_tokens: most tokens of a sample, without padding; None for no limit.
        limited_by: setting of `max_tokens`, for messages.
    """

    limits: Mapping[str, Limits] = field(default_factory=dict)
    max_tokens: Optional[int] = None
    limited_by: str = "data.max_tokens_per_pack"

    def check(self, clip: Clip) -> None:
        """Compare a sample, before augmentation, with the limits."""
        for name, limits in self.limits.items():
            value = MEASURES[name](clip)
            measure = name.replace("_", " ")
            if value is None:
                raise FilteredOutError(name, f"no {measure}, expected {limits}")
            if value not in limits:
                raise FilteredOutError(name, f"{measure} {value:g}, expected {limits}")

    def check_length(self, tokens: int) -> None:
        if self.max_tokens is not None and tokens > self.max_tokens:
            cure = f"raise {self.limited_by}, or use smaller samples"
            raise FilteredOutError(TOO_LONG, f"{tokens} tokens, at most {self.max_tokens} fit; {cure}")
