"""The sizes that pictures and frames are brought to."""

import math
from dataclasses import dataclass
from typing import Literal, Optional

from PIL import Image

from dit.errors import ConfigError
from energon_data.samples import SampleError

Aspect = Literal["keep", "square", "buckets"]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Which size a picture is brought to. Pictures are only ever made smaller, except to fill a square or a bucket.

    Attributes:
        size: side of a square, in pixels, whose area is the largest that a picture may have; None for native sizes.
        aspect: `keep` scales both sides alike, until the area fits; `square` scales the shorter side to `size` and cuts
            the middle out; `buckets` does so with the closest in ratio of `buckets(size, multiple_of)`.
        multiple_of: both sides become multiples of it by cutting the borders evenly (VAE compression times patch).
    """

    size: Optional[int] = None
    aspect: Aspect = "keep"
    multiple_of: int = 16

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ConfigError(f"sides must be multiples of a positive number, got {self.multiple_of}")
        if self.size is None and self.aspect != "keep":
            raise ConfigError(f"--aspect {self.aspect} needs --size: the side of the square in pixels")
        if self.size is not None and (self.size < 1 or self.size % self.multiple_of):
            raise ConfigError(f"--size {self.size} must be a positive multiple of --multiple-of {self.multiple_of}")

    def target(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return how a picture is scaled and cut.

        Args:
            width, height: in pixels.

        Returns:
            Width and height it is scaled to, then width and height that the cut leaves.

        Raises:
            SampleError: the picture is smaller than one multiple on a side.
        """
        m = self.multiple_of
        if self.size is None:
            wide, high = width, height
        elif self.aspect == "keep":
            shrink = min(1.0, self.size / math.sqrt(width * height))
            wide, high = (max(1, math.floor(side * shrink + 1e-9)) for side in (width, height))
        else:
            choices = [(self.size, self.size)] if self.aspect == "square" else buckets(self.size, m)
            cut = min(choices, key=lambda c: abs(math.log(c[0] / c[1] * height / width)))
            grow = max(cut[0] / width, cut[1] / height)
            return max(cut[0], round(width * grow)), max(cut[1], round(height * grow)), *cut
        cut = (wide // m * m, high // m * m)
        if 0 in cut:
            scaled = "" if (wide, high) == (width, height) else f" scaled to {wide} x {high}"
            raise SampleError("too_small", f"{width} x {height} pixels{scaled}; the least is {m} x {m}")
        return wide, high, *cut

    def apply(self, picture: Image.Image) -> Image.Image:
        """Scale and cut a picture around its middle; the very same object if it fits already.

        Raises:
            SampleError: it is too small.
        """
        wide, high, cut_wide, cut_high = self.target(*picture.size)
        if (wide, high) == (cut_wide, cut_high) == picture.size:
            return picture
        if (wide, high) != picture.size:
            picture = picture.resize((wide, high), Image.Resampling.LANCZOS)
        left, top = (wide - cut_wide) // 2, (high - cut_high) // 2
        return picture.crop((left, top, left + cut_wide, top + cut_high))


def buckets(size: int, multiple_of: int) -> list[tuple[int, int]]:
    """Return (width, height) of the aspect buckets: multiples, area at most `size` squared, ratios from 1:4 to 4:1.

    For every width that is a multiple, the largest height that fits; of buckets with one height, the widest.
    """
    found: dict[int, int] = {}
    for width in range(multiple_of, 4 * size + 1, multiple_of):
        height = size * size // width // multiple_of * multiple_of
        if height and 1 / 4 <= width / height <= 4:
            found[height] = width
    return [(width, height) for height, width in sorted(found.items())]
