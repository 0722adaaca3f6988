"""Random augmentation of pictures and clips at load time.

Every random draw is a function of (seed, stream, number of the sample in its stream, sample id), so a resumed run makes
the same crops and flips in any process.
"""

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import Optional

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dit.media import MAX_PIXELS
from energon_data.samples import FilteredOutError


@dataclass(frozen=True)
class Visit:
    """One reading of one sample: the address of its random numbers.

    Attributes:
        stream: global stream that reads the sample.
        number: number of samples that the stream read before from the same member of a blend.
    """

    seed: int
    stream: int
    number: int
    sample: int

    def generator(self, purpose: str = "") -> np.random.Generator:
        """Return the random generator for one use in this visit: Philox (Salmon et al. 2011) with an address as key."""
        address = f"{self.seed}/{self.stream}/{self.number}/{self.sample}{purpose}".encode()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(blake2b(address, digest_size=16).digest())))


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Resize, crop and flip, in this order; the same for all frames of a clip.

    Attributes:
        smallest_side: resize the smaller side to this many pixels and keep the aspect ratio (bicubic, antialiased);
            None for the stored size.
        crop: height and width of the crop; None crops only to multiples of `multiple_of`.
        random_crop: whether the crop position is drawn uniformly; otherwise the centre is used.
        flip: probability of a horizontal flip.
        multiple_of: sides are multiples of this.
    """

    smallest_side: Optional[int] = None
    crop: Optional[tuple[int, int]] = None
    random_crop: bool = True
    flip: float = 0.0
    multiple_of: int = 1

    def __call__(self, pixels: Tensor, visit: Visit) -> Tensor:
        random = visit.generator()
        if self.smallest_side is not None:
            pixels = resize(pixels, self.smallest_side)
        height, width = pixels.shape[-2:]
        of = self.multiple_of
        h, w = self.crop or (height // of * of, width // of * of)
        if h > height or w > width or not h or not w:
            target = f"{h} x {w}" if self.crop else f"multiples of {of}"
            raise FilteredOutError("too_small", f"{height} x {width} pixels, cropped to {target}")
        # Always draw three numbers, so that the size does not change the flip.
        y, x, mirror = random.random(3)
        if not (self.random_crop and self.crop):
            y = x = 0.5
        top, left = int(y * (height - h + 1)), int(x * (width - w + 1))
        pixels = pixels[..., top : top + h, left : left + w]
        return pixels.flip(-1) if mirror < self.flip else pixels


def resize(pixels: Tensor, smallest_side: int) -> Tensor:
    """Resize uint8 `[C, T, H, W]` so that the smaller side has `smallest_side` pixels; bicubic, antialiased."""
    height, width = pixels.shape[-2:]
    scale = smallest_side / min(height, width)
    size = (round(height * scale), round(width * scale))
    if size == (height, width):
        return pixels
    if math.prod(size) > MAX_PIXELS:
        numbers = f"{height} x {width} pixels, resized to {size[0]} x {size[1]}, more than {MAX_PIXELS:,} pixels"
        raise FilteredOutError("too_large", f"{numbers}; lower data.resize_side, or leave the picture out")
    frames = pixels.transpose(0, 1).float()
    frames = interpolate(frames, size=size, mode="bicubic", antialias=True, align_corners=False)
    return frames.round_().clamp_(0, 255).to(torch.uint8).transpose(0, 1)
