"""Mean and standard deviation of latents. Noise schedules expect a standard deviation of about 1."""

import math
from typing import NamedTuple

import numpy as np

LOW, HIGH = 0.5, 2.0
"""Range of standard deviations without a warning."""


class Moments(NamedTuple):
    """Number, sum and sum of squares of values."""

    number: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> "Moments":
        wide = values.astype(np.float64)
        return cls(wide.size, float(wide.sum()), float(np.square(wide).sum()))

    def plus(self, other: "Moments") -> "Moments":
        """Return the moments of the union of both sets of values."""
        return Moments(self.number + other.number, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.number

    @property
    def std(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.number - self.mean**2))

    def line(self) -> str:
        """Return mean and standard deviation as text, with a warning if the deviation is far from 1."""
        text = f"mean {self.mean:.3g}, standard deviation {self.std:.3g}"
        if LOW <= self.std <= HIGH:
            return text
        return (
            f"{text}; warning: training expects about 1 ({LOW:g} to {HIGH:g}), check scaling_factor in the "
            "autoencoder's config.json"
        )
