"""Rotary positions, applied to queries and keys; the eager implementation.

Source: Su et al. 2021, arXiv:2104.09864, in the half-split form of Llama.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """The rotation of each token's features: cosine and sine of the angles, float32 `[T, 1, H / 2]`."""

    cos_T1H: Tensor
    sin_T1H: Tensor


def rotate(x_TNH: Tensor, rotation: Optional[Rotation]) -> Tensor:
    """Rotate the pairs (i, i + H / 2) of each head's features; computed in float32, returned in the dtype of `x_TNH`.

    Args:
        x_TNH: queries or keys.
        rotation: None returns `x_TNH` itself.
    """
    if rotation is None:
        return x_TNH
    a, b = x_TNH.float().chunk(2, dim=-1)
    cos, sin = rotation.cos_T1H, rotation.sin_T1H
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_TNH.dtype)
