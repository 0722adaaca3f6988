"""Fixed sine-cosine position embeddings, computed from the patch indices themselves: no table, so nothing aliases."""

from typing import Literal

import torch
from torch import Tensor

from dit.errors import ConfigError

PositionEmbedding = Literal["sincos_2d", "sincos_3d"]


def sincos_1d(position_T: Tensor, size: int) -> Tensor:
    """Embed integer positions as `size / 2` sines, then cosines, of wavelengths 2 pi ... 20000 pi; float32 `[T, size]`.

    Source: Vaswani et al. 2017, section 3.5, in the half-half order of MAE (He et al. 2022) and DiT.
    """
    frequency = 10000.0 ** -(torch.arange(size // 2, device=position_T.device, dtype=torch.float64) / (size // 2))
    angle = position_T.double()[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1).float()


def check_size(hidden_size: int, kind: PositionEmbedding) -> None:
    """Check that the hidden size can be divided among the axes, each of which needs a sine and a cosine.

    Raises:
        ConfigError: it cannot.
    """
    if kind not in ("sincos_2d", "sincos_3d"):
        raise ConfigError(f"position_embedding={kind!r} is unknown; use 'sincos_2d' or 'sincos_3d'")
    smallest = 4 if kind == "sincos_2d" else 12
    if hidden_size % 4 or hidden_size < smallest:
        raise ConfigError(
            f"hidden_size={hidden_size} must be a multiple of 4 and at least {smallest} for {kind} positions"
        )


def sincos(positions_T3: Tensor, hidden_size: int, kind: PositionEmbedding) -> Tensor:
    """Embed (t, h, w) patch indices, float32 `[T, hidden_size]`.

    `sincos_2d` is DiT's: one half of the features for w, the other for h, time ignored (MAE's order).
    `sincos_3d` gives time and both image axes a third each, in even sizes; what is left over goes to the image axes.
    """
    t, h, w = positions_T3.unbind(-1)
    if kind == "sincos_2d":
        return torch.cat([sincos_1d(w, hidden_size // 2), sincos_1d(h, hidden_size // 2)], -1)
    time_size = hidden_size // 6 * 2
    time_size -= (hidden_size - time_size) % 4
    image_size = (hidden_size - time_size) // 2
    return torch.cat([sincos_1d(t, time_size), sincos_1d(h, image_size), sincos_1d(w, image_size)], -1)
