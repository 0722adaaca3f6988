"""Operations between a projection and attention: split into heads, QK norm, rotary positions; eager implementation.

Shape suffixes: T tokens, G groups of heads, M heads of a group, N heads, H head size.

Source: Su et al. 2021, arXiv:2104.09864, in the half-split form of Llama; QK norm: Dehghani et al. 2023,
arXiv:2302.05442, with RMS (Zhang and Sennrich 2019).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

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
        rotation: None returns `x_TNH` itself.
    """
    if rotation is None:
        return x_TNH
    a, b = x_TNH.float().chunk(2, dim=-1)
    cos, sin = rotation.cos_T1H, rotation.sin_T1H
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_TNH.dtype)


@dataclass(frozen=True)
class Heads:
    """Order of a projection's output features in each group: query heads, then a key head, then a value head.

    Attributes:
        keys, values: whether a group has a key head, and a value head.
    """

    queries: int
    keys: bool = True
    values: bool = True

    @property
    def parts(self) -> tuple[int, int, int]:
        """Number of query, key and value heads in a group."""
        return self.queries, int(self.keys), int(self.values)

    @property
    def size(self) -> int:
        """Number of heads in a group."""
        return self.queries + self.keys + self.values

    def grouped(self, x: Tensor, groups: int) -> Tensor:
        """View a projection `[T, ...]` as `[T, G, M, H]`."""
        return x.view(x.shape[0], groups, self.size, math.prod(x.shape[1:]) // (groups * self.size))

    def views(self, x_TGMH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[T, N, H]`, keys and values `[T, G, H]`; missing parts have zero heads."""
        if self.queries == 1 and self.keys and self.values:
            q, k, v = x_TGMH.unbind(2)
            return q, k, v
        q, k, v = x_TGMH.split(list(self.parts), dim=2)
        return q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)

    def present(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts that the projection has."""
        return [part for part, has in zip(parts, self.parts) if has]


class HeadNorm(NamedTuple):
    """RMS norm over each head."""

    weight_q: Optional[Tensor]
    weight_k: Optional[Tensor]
    eps: float


def split_heads(
    x: Tensor,
    groups: int,
    heads: Heads,
    norm: Optional[HeadNorm] = None,
    rotation: Optional[Rotation] = None,
    bias: Optional[Tensor] = None,
) -> list[Tensor]:
    """Split the output of a projection into queries, keys and values; normalise and rotate queries and keys.

    Args:
        x: output of the projection, including its bias, `[T, G * M * H]` or `[T, G, M * H]`.
        groups: G, the local groups of heads.
        bias: bias of the projection `[G * M * H]` if this function computes its gradient, else None.

    Returns:
        Queries `[T, N, H]`, keys and values `[T, G, H]`, without the parts that the projection does not have.
    """
    assert bias is None, "the eager form does not compute the gradient of the bias; the projection does"
    q, k, v = heads.views(heads.grouped(x, groups))
    if norm is not None:
        q, k = (
            part if weight is None else F.rms_norm(part, part.shape[-1:], weight, norm.eps)
            for part, weight in ((q, norm.weight_q), (k, norm.weight_k))
        )
    return heads.present((rotate(q, rotation), rotate(k, rotation), v))
