"""What comes between a projection and attention: heads, their RMS norm, rotary positions; the eager implementation.

Shape suffixes: T tokens, G groups of heads, M heads of a group, N heads, H head size.

Source: Su et al. 2021, arXiv:2104.09864, in the half-split form of Llama; QK norm: Dehghani et al. 2023,
arXiv:2302.05442, with RMS (Zhang and Sennrich 2019).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
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


@dataclass(frozen=True)
class Heads:
    """What the output features of a projection are, group by group: query heads, a key head, a value head.

    Attributes:
        queries: query heads of a group.
        keys, values: whether a group has a key head, and a value head behind it.
    """

    queries: int
    keys: bool = True
    values: bool = True

    def views(self, x_TGMH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[T, N, H]`, keys and values `[T, G, H]`; of no heads for what there is not."""
        if self.queries == 1 and self.keys and self.values:
            q, k, v = x_TGMH.unbind(2)
            return q, k, v
        q, k, v = x_TGMH.split([self.queries, int(self.keys), int(self.values)], dim=2)
        return q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)

    def present(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return those of queries, keys and values that there are."""
        return [part for part, has in zip(parts, (self.queries, self.keys, self.values)) if has]


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm over each head.

    Attributes:
        weight_q, weight_k: `[H]`; None for heads that a projection has not.
        eps: added to the mean square.
    """

    weight_q: Optional[Tensor]
    weight_k: Optional[Tensor]
    eps: float


def split_heads(
    x_TGMH: Tensor,
    heads: Heads,
    norm: Optional[HeadNorm] = None,
    rotation: Optional[Rotation] = None,
    bias: Optional[Tensor] = None,
) -> list[Tensor]:
    """Split the output of a projection into queries, keys and values; normalise and rotate queries and keys.

    Args:
        x_TGMH: the projection, its bias included.
        bias: where the projection left the gradient of its bias to this function, `[G * M * H]`; else None.

    Returns:
        Those of queries `[T, N, H]`, keys and values `[T, G, H]` that the projection has.
    """
    assert bias is None, "the eager form has no gradient of the bias: the projection computes it"
    q, k, v = heads.views(x_TGMH)
    if norm is not None:
        q, k = (
            x if weight is None else F.rms_norm(x, x.shape[-1:], weight, norm.eps)
            for x, weight in ((q, norm.weight_q), (k, norm.weight_k))
        )
    return heads.present((rotate(q, rotation), rotate(k, rotation), v))
