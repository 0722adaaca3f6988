"""The sizes that pictures and frames are brought to."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Optional

from PIL import Image

from dit.errors import ConfigError
from energon_data.samples import SampleError

Aspect = Literal["keep", "square", "buckets"]


class Target(NamedTuple):
    """Width and height that a picture is scaled to, then width and height that the cut leaves."""

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
        """Left and top of the cut, around the middle of the scaled picture."""
        return (self.wide - self.cut_wide) // 2, (self.high - self.cut_high) // 2

    def enlarges(self, width: int, height: int) -> bool:
        """Return whether a picture of this size is scaled up."""
        return self.wide > width or self.high > height


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Which size a picture is brought to.

    With `size`, it is scaled to cover one of the sizes that `aspect` allows, and its middle is cut out. Of these sizes
    the one with the largest area * (share of the picture that is left)**4 is selected: near in ratio, and not small.

    Attributes:
        size: side of a square, in pixels, whose area is the largest that a picture may have; None for native sizes,
            which are cut only.
        aspect: `keep` allows the sizes of which a side cannot be longer, `square` only `size` x `size`, `buckets` those
            of `buckets(size, multiple_of)`.
        multiple_of: both sides become multiples of it (VAE compression times patch).
        enlarge: scale small pictures up; otherwise a size that is larger than the picture on a side is not allowed.
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

    @lru_cache(maxsize=1024)  # noqa: B019, for the frames of a clip; a value
    def target(self, width: int, height: int) -> Target:
        """Return how a picture is scaled and cut.

        Args:
            width, height: in pixels.

        Raises:
            SampleError: the picture is smaller than every allowed size on a side, or too much would be cut.
        """
        sizes = [c for c in self._sizes(width, height) if self.enlarge or (c[0] <= width and c[1] <= height)]
        if not sizes:
            side = self.size if self.aspect == "square" else self.multiple_of
            cure = "; --enlarge scales it up" if self.size is not None else ""
            least = f"the least is {side} x {side}" if self.aspect != "buckets" else "no bucket is as small"
            raise SampleError("too_small", f"{width} x {height} pixels; {least}{cure}")

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
        """Scale and cut a picture around its middle; the very same object if it fits already.

        Raises:
            SampleError: as `target`.
        """
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

    For every width that is a multiple, the largest height that fits; of buckets with one height, the widest.
    """
    found: dict[int, int] = {}
    for width in range(multiple_of, 4 * size + 1, multiple_of):
        height = size * size // width // multiple_of * multiple_of
        if height and 1 / 4 <= width / height <= 4:
            found[height] = width
    return [(width, height) for height, width in sorted(found.items())]
