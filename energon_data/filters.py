"""Which decoded samples are used. Pure functions: the result depends on the sample alone."""

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from energon_data.samples import Clip, SampleError, finite_number


class FilteredOutError(Exception):
    """A valid sample that the settings exclude.

    Args:
        reason: the word under which such samples are counted.
        detail: the limit, and the value of the sample.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Limits of samples.

    Attributes:
        max_abs: largest valid absolute value of a latent.
        min_aesthetic_score: lowest `aesthetic_score` in the metadata; a sample without one is dropped. None for no
            limit.
        max_tokens: longest sample in tokens, its own padding included; None for any.
    """

    max_abs: float = 1e3
    min_aesthetic_score: Optional[float] = None
    max_tokens: Optional[int] = None

    def check_values(self, x: Tensor, what: str) -> None:
        """Refuse values that are not finite or too large.

        Raises:
            SampleError: a value is NaN, infinite, or beyond `max_abs`.
        """
        low, high = torch.aminmax(x)
        largest = max(-low.item(), high.item())
        # A NaN fails every comparison, so the comparison must be the one that accepts.
        if not largest <= self.max_abs or math.isnan(low.item()):
            raise SampleError("not_finite", f"{what} reach {largest:g}, sound are at most {self.max_abs:g}")

    def check(self, clip: Clip, padded_tokens: int) -> None:
        """Apply the score and the length limit.

        Raises:
            FilteredOutError: the sample is outside the limits.
            SampleError: it has a score that is no number.
        """
        if self.min_aesthetic_score is not None:
            if clip.metadata.get("aesthetic_score") is None:
                raise FilteredOutError("aesthetic_score", f"no score, asked for {self.min_aesthetic_score:g}")
            score = finite_number(clip.metadata, "aesthetic_score")
            if score < self.min_aesthetic_score:
                raise FilteredOutError("aesthetic_score", f"score {score:g}, asked for {self.min_aesthetic_score:g}")
        if self.max_tokens is not None and padded_tokens > self.max_tokens:
            raise FilteredOutError("too_long", f"{padded_tokens} tokens with padding, at most {self.max_tokens} fit")
