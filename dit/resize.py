"""Resized pictures, the condition of super-resolution models."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import interpolate, pad

Kernel = Literal["pil", "opencv"]
"""Bicubic kernels, named after libraries; their coefficients a are -0.5 and -0.75."""


def enlarged(pictures: Tensor, factor: int, kernel: Kernel = "pil") -> Tensor:
    """Return pictures `[..., h, w]` enlarged by bicubic interpolation, `[..., factor h, factor w]`, float32."""
    size = (pictures.shape[-2] * factor, pictures.shape[-1] * factor)
    # torch uses a = -0.5 with antialiasing, which has no other effect on enlarged pictures.
    return _resized(pictures, size, antialias=kernel == "pil")


def reduced(pictures: Tensor, factor: int) -> Tensor:
    """Return pictures `[..., h, w]` reduced by antialiased bicubic interpolation, `[..., h / factor, w / factor]`.

    The last row and column are repeated up to multiples of the factor, so the sides are rounded up; float32.
    """
    flat = pictures.float().reshape(-1, 1, *pictures.shape[-2:])
    flat = pad(flat, (0, -flat.shape[-1] % factor, 0, -flat.shape[-2] % factor), mode="replicate")
    size = (flat.shape[-2] // factor, flat.shape[-1] // factor)
    return _resized(flat, size, antialias=True).view(*pictures.shape[:-2], *size)


def _resized(pictures: Tensor, size: tuple[int, int], *, antialias: bool) -> Tensor:
    flat = pictures.float().reshape(-1, 1, *pictures.shape[-2:])
    return interpolate(flat, size, mode="bicubic", antialias=antialias).view(*pictures.shape[:-2], *size)


@dataclass(frozen=True)
class LowResolution:
    """A low-resolution picture at the size of the latent: reduced, then enlarged again."""

    factor: int
    kernel: Kernel = "pil"

    def enlarge(self, small: Tensor) -> Tensor:
        """Enlarge small pictures `[..., h, w]` to the size of the latent."""
        return enlarged(small, self.factor, self.kernel)

    def __call__(self, latent: Tensor) -> Tensor:
        """Return the low-resolution picture of a latent `[C, T, H, W]`, same shape, float32."""
        height, width = latent.shape[-2:]
        return self.enlarge(reduced(latent, self.factor))[..., :height, :width]
