"""Corruption of the low-resolution pictures of a super-resolution model, so that it learns to enlarge imperfect ones.

The low-resolution picture is made from the sample, corrupted, and enlarged to the sample's size. The first blur and
JPEG are applied at its original size. If it is resized (`enlarge`, `reduce`), noise and the second blur are applied at
the other size, before it is resized back. All random draws belong to one visit of the sample
(`energon_data.augment.Visit`), so a resumed run makes bitwise the same corruption.
"""

import io
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, pad

from dit.media import open_image

GREYS = 255.0
"""Grey levels of a stored picture, the unit of published noise strengths."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A range of numbers to draw from uniformly."""

    low: float
    high: float

    def draw(self, random: np.random.Generator) -> float:
        return float(random.uniform(self.low, self.high))


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """Blur, resizing, noise, second blur and noise, JPEG, in this order, on the low-resolution picture.

    Attributes:
        blur: probability of each of the two Gaussian blurs.
        max_radius: largest blur radius in pixels; the radius is drawn from 1 on and determines sigma, see `blur_sigma`.
        enlarge, reduce: probabilities that the picture is enlarged or reduced, and resized back at the end.
        scale: smallest and largest size relative to the original.
        noise: standard deviation of the first Gaussian noise, in grey levels of 255.
        second_noise: standard deviation of the second Gaussian noise.
        poisson: strength of Poisson noise, whose variance equals the grey level at strength 1.
        jpeg: probability of JPEG, at a `quality` of 1 to 100.

    Source: the `corruption_aug` settings of NVIDIA NeMo's Imagen, which no release implements: probabilities and ranges
    are theirs; the order, and the meaning of a radius (OpenCV's rule), are defined by this project.
    """

    blur: float = 0.2
    max_radius: int = 3
    enlarge: float = 0.2
    reduce: float = 0.2
    scale: Span = Span(low=0.8, high=1.2)
    noise: Span = Span(low=0.0, high=3.0)
    second_noise: Span = Span(low=0.0, high=2.5)
    poisson: Span = Span(low=0.005, high=3.0)
    jpeg: float = 0.0
    quality: Span = Span(low=75, high=95)

    def __call__(self, picture: Tensor, random: np.random.Generator) -> Tensor:
        """Corrupt a low-resolution picture or clip; frames share the strengths, but have different noise.

        Args:
            picture: `[C, T, h, w]` in [-1, 1]; 3 channels for JPEG.

        Returns:
            `[C, T, h, w]` float32 in [-1, 1].
        """
        # Always draw all strengths first, so that one probability does not change the other draws.
        choices = random.random(4)
        radii = random.integers(1, self.max_radius + 1, 2)
        larger, smaller = random.uniform(1.0, self.scale.high), random.uniform(self.scale.low, 1.0)
        first, second = self.noise.draw(random), self.second_noise.draw(random)
        poisson, quality = self.poisson.draw(random), self.quality.draw(random)

        x = picture.float()
        size = (x.shape[-2], x.shape[-1])
        if choices[0] < self.blur:
            x = blurred(x, int(radii[0]))
        if choices[1] < self.enlarge + self.reduce:
            x = resized(x, larger if choices[1] < self.enlarge else smaller)
        x = with_poisson_noise(with_noise(x, first, random), poisson, random)
        if choices[2] < self.blur:
            x = blurred(x, int(radii[1]))
        x = with_noise(x, second, random)
        if x.shape[-2:] != size:
            x = _to_size(x, size)
        x = x.clamp(-1, 1)
        return through_jpeg(x, round(quality)) if choices[3] < self.jpeg else x


def blur_sigma(radius: int) -> float:
    """Return the standard deviation of a Gaussian blur in pixels: OpenCV's rule for a kernel of 2 radius + 1."""
    return 0.3 * (radius - 1) + 0.8


def blurred(x: Tensor, radius: int) -> Tensor:
    """Convolve pictures `[..., h, w]` with a Gaussian of 2 radius + 1 pixels; border pixels are replicated."""
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float32)
    kernel = torch.exp(-0.5 * (offsets / blur_sigma(radius)) ** 2)
    kernel = kernel / kernel.sum()
    flat = pad(x.reshape(-1, 1, *x.shape[-2:]), (radius,) * 4, mode="replicate")
    return conv2d(conv2d(flat, kernel[None, None, :, None]), kernel[None, None, None, :]).view(x.shape)


def resized(x: Tensor, scale: float) -> Tensor:
    """Resize pictures `[..., h, w]` to `scale` times their sides, rounded, at least one pixel."""
    return _to_size(x, (max(1, round(x.shape[-2] * scale)), max(1, round(x.shape[-1] * scale))))


def _to_size(x: Tensor, size: tuple[int, int]) -> Tensor:
    flat = x.reshape(-1, 1, *x.shape[-2:])
    return interpolate(flat, size, mode="bicubic", antialias=True, align_corners=False).view(*x.shape[:-2], *size)


def with_noise(x: Tensor, sigma: float, random: np.random.Generator) -> Tensor:
    """Add Gaussian noise of `sigma` grey levels to pictures in [-1, 1]."""
    eps = torch.from_numpy(random.standard_normal(x.shape, np.float32))
    return x + 2 * sigma / GREYS * eps


def with_poisson_noise(x: Tensor, strength: float, random: np.random.Generator) -> Tensor:
    """Add strength * (Poisson(g) - g) to pictures in [-1, 1], g the grey level: brighter pixels get more noise."""
    grey = (x.clamp(-1, 1) + 1) / 2 * GREYS
    drawn = torch.from_numpy(random.poisson(grey.double().numpy()).astype(np.float32))
    return x + 2 * strength / GREYS * (drawn - grey)


def through_jpeg(x: Tensor, quality: int) -> Tensor:
    """Encode each frame of `[1 or 3, T, h, w]` in [-1, 1] as JPEG and decode it."""
    frames = ((x + 1) / 2 * GREYS).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()
    decoded = []
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame).save(buffer, "JPEG", quality=quality)
        decoded.append(np.asarray(open_image(buffer)).reshape(frame.shape))
    return torch.from_numpy(np.stack(decoded)).permute(3, 0, 1, 2).float() / GREYS * 2 - 1
