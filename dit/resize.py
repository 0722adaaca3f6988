"""Pictures at another size: what a super-resolution model is conditioned on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from torch import Tensor
from torch.nn.functional import interpolate


def enlarged(pictures: Tensor, factor: int) -> Tensor:
    """Return pictures `[..., h, w]` enlarged by bicubic interpolation, `[..., factor h, factor w]`, float32."""
    return _resized(pictures, (pictures.shape[-2] * factor, pictures.shape[-1] * factor))


def reduced(pictures: Tensor, factor: int) -> Tensor:
    """Return pictures `[..., h, w]` reduced by antialiased bicubic interpolation, `[..., h / factor, w / factor]`.

    Sides that are no multiples of the factor are rounded up; float32.
    """
    return _resized(pictures, (-(-pictures.shape[-2] // factor), -(-pictures.shape[-1] // factor)))


def _resized(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    flat = pictures.float().reshape(-1, 1, *pictures.shape[-2:])
    return interpolate(flat, size, mode="bicubic", antialias=True).view(*pictures.shape[:-2], *size)


@dataclass(frozen=True)
class LowResolution:
    """A picture of the size of the latent that shows no more than a smaller one: reduced and enlarged again.

    Args:
        factor: between the two sizes.
    """

    factor: int

    def __call__(self, latent: Tensor, change: Optional[Callable[[Tensor], Tensor]] = None) -> Tensor:
        """Return the picture for a latent `[C, T, H, W]`, of its shape, float32.

        Args:
            change: of the small picture `[C, T, h, w]`, before it is enlarged.
        """
        height, width = latent.shape[-2:]
        small = reduced(latent, self.factor)
        return enlarged(small if change is None else change(small), self.factor)[..., :height, :width]
