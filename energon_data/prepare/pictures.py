"""Selection of the size to which pictures and frames are scaled and cut."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Optional

from PIL import Image

from dit.errors import ConfigError
from dit.media import MAX_PIXELS
from energon_data.samples import SampleError

Aspect = Literal["keep", "square", "buckets"]


class Target(NamedTuple):
    """Width and height after scaling, then width and height after the cut."""

    wide: int
    high: int
    cut_wide: int
    cut_high: int

    @property
    def cut(self) -> float:
        """Share of the picture that is cut off."""
        return 1 - self.cut_wide * self.cut_high / (self.wide * self.high)

    @property
    def corner(self) -> tuple[int, int]:
        """Left and top of the cut, which is centred in the scaled picture."""
        return (self.wide - self.cut_wide) // 2, (self.high - self.cut_high) // 2

    def enlarges(self, width: int, height: int) -> bool:
        """Return whether a picture of this size is scaled up."""
        return self.wide > width or self.high > height


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Rules for the target size of pictures.

    With `size`, a picture is scaled to cover one of the sizes that `aspect` allows, and the centre is cut out. The
    selected size maximises area * (remaining share of the picture)**4: a similar ratio, and not small.

    Attributes:
        size: side, in pixels, of a square with the largest allowed area; None for native sizes, which are only cut.
        aspect: `keep` allows all sizes with maximal sides, `square` only `size` x `size`, `buckets` those of
            `buckets(size, multiple_of)`.
        multiple_of: both sides become multiples of it (VAE compression times patch).
        enlarge: scale small pictures up; otherwise sizes with a side longer than the picture's are not allowed.
        max_cut: largest share of a picture that may be cut off.
    """

    size: Optional[int] = None
    aspect: Aspect = "keep"
    multiple_of: int = 16
    enlarge: bool = False
    max_cut: float = 0.5

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ConfigError(f"sides must be multiples of a positive number, got {self.multiple_of}")
        if self.size is None and (self.aspect != "keep" or self.enlarge):
            flag = "--enlarge" if self.aspect == "keep" else f"--aspect {self.aspect}"
            raise ConfigError(f"{flag} needs --size: the side of the square in pixels")
        if self.size is not None and (self.size < 1 or self.size % self.multiple_of):
            raise ConfigError(f"--size {self.size} must be a positive multiple of --multiple-of {self.multiple_of}")
        if not 0 <= self.max_cut <= 1:
            raise ConfigError(f"--max-cut {self.max_cut:g} must be a share of the picture, from 0 to 1")

    @lru_cache(maxsize=1024)  # noqa: B019, for the frames of a clip; instances are immutable
    def target(self, width: int, height: int) -> Target:
        """Return the sizes to which a picture is scaled and cut."""
        sizes = [c for c in self._sizes(width, height) if self.enlarge or (c[0] <= width and c[1] <= height)]
        if not sizes:
            side = self.size if self.aspect == "square" else self.multiple_of
            cure = "; --enlarge scales it up" if self.size is not None else ""
            smallest = f"the smallest size is {side} x {side}" if self.aspect != "buckets" else "no bucket is as small"
            raise SampleError("too_small", f"{width} x {height} pixels; {smallest}{cure}")

        def score(size: tuple[int, int]) -> float:
            ratio = size[0] / size[1] * height / width
            return size[0] * size[1] * min(ratio, 1 / ratio) ** 4

        wide, high = max(sizes, key=score)
        scale = 1.0 if self.size is None else max(wide / width, high / height)
        target = Target(max(wide, round(width * scale)), max(high, round(height * scale)), wide, high)
        if target.cut > self.max_cut:
            raise SampleError(
                "cut_too_much",
                f"{width} x {height} pixels become {wide} x {high}, without {target.cut:.0%} of the picture; "
                f"--max-cut {self.max_cut:g} is the limit",
            )
        if target.wide * target.high > MAX_PIXELS:
            scaled = f"scaled to {target.wide} x {target.high}, more than {MAX_PIXELS:,} in all"
            raise SampleError("too_large", f"{width} x {height} pixels, {scaled}; lower --size, or crop it")
        return target

    def _sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """Return width and height of the sizes that `aspect` allows."""
        m = self.multiple_of
        if self.size is None:
            return [(width // m * m, height // m * m)] if min(width, height) >= m else []
        if self.aspect == "square":
            return [(self.size, self.size)]
        if self.aspect == "buckets":
            return buckets(self.size, m)
        area = self.size**2
        most_wide, most_high = (area // m, area // m) if self.enlarge else (width, height)
        # The highest of each width and the widest of each height.
        highest = [(w, min(most_high, area // w) // m * m) for w in range(m, min(most_wide, area // m) + 1, m)]
        widest = [(min(most_wide, area // h) // m * m, h) for h in range(m, min(most_high, area // m) + 1, m)]
        return [size for size in (*highest, *widest) if 0 not in size]

    def apply(self, picture: Image.Image) -> Image.Image:
        """Scale a picture and cut out its centre; returns the same object if no change is needed."""
        target = self.target(*picture.size)
        wide, high, cut_wide, cut_high = target
        if (wide, high) == (cut_wide, cut_high) == picture.size:
            return picture
        if (wide, high) != picture.size:
            picture = picture.resize((wide, high), Image.Resampling.LANCZOS)
        left, top = target.corner
        return picture.crop((left, top, left + cut_wide, top + cut_high))


def buckets(size: int, multiple_of: int) -> list[tuple[int, int]]:
    """Return (width, height) of the aspect buckets: multiples, area at most `size` squared, ratios from 1:4 to 4:1.

    Every width is combined with its largest height; of buckets with the same height, only the widest is returned.
    """
    widths: dict[int, int] = {}
    for width in range(multiple_of, 4 * size + 1, multiple_of):
        height = size * size // width // multiple_of * multiple_of
        if height and 1 / 4 <= width / height <= 4:
            widths[height] = width
    return [(width, height) for height, width in sorted(widths.items())]
