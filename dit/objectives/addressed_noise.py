"""Noise by address: every draw is a function of (seed, step, sample, purpose, element), never of a stream.

The same sample gets the same noise on every parallel layout, on every pipeline stage and after every resume, because
nothing is carried from one draw to the next. Each rank draws only the rows it holds.

Source: Philox-4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Box-Muller transform.
"""

import math
import zlib

import torch
from torch import Tensor

from dit.batch import SequenceLayout

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four random 32-bit words per counter (int64 tensors that hold unsigned 32-bit values).

    Args:
        counter: four int64 tensors of one shape with values in `[0, 2**32)`.
        key: two 32-bit integers.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64, so the low and (masked) high halves are still the exact ones.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL_A) & _MASK, (k1 + _WEYL_B) & _MASK
    return c0, c1, c2, c3


def _unit(word: Tensor) -> Tensor:
    """Map 32-bit words to float32 in the open interval (0, 1)."""
    return ((word >> 9).float() + 0.5) * 2.0**-23


class AddressedNoise:
    """The random draws of one micro-batch.

    Args:
        seed: seed of the run.
        step: optimizer step, counted from 0.
        sample_ids_S: address of each sample, int64.
        layout: rows held by this rank.
    """

    def __init__(self, seed: int, step: int, sample_ids_S: Tensor, layout: SequenceLayout) -> None:
        self.seed, self.step, self.layout = seed, step, layout
        self.sample_ids_S = sample_ids_S

    def _words(self, purpose: str, ids: Tensor, element: Tensor) -> tuple[Tensor, ...]:
        ids, element = torch.broadcast_tensors(ids, element)
        key = ((self.seed ^ zlib.crc32(purpose.encode())) & _MASK, ((self.seed >> 32) ^ 0x5DEECE66) & _MASK)
        counter = (element, torch.full_like(element, self.step), ids & _MASK, (ids >> 32) & _MASK)
        return philox(counter, key)

    def level_S(self) -> Tensor:
        """Draw the quantile of each sample's noise level, in (0, 1), float32 `[S]`."""
        return self.uniform_S("level")

    def uniform_S(self, purpose: str) -> Tensor:
        """Draw one number in (0, 1) per sample, float32 `[S]`."""
        return _unit(self._words(purpose, self.sample_ids_S, torch.zeros_like(self.sample_ids_S))[0])

    def normal_S(self, purpose: str) -> Tensor:
        """Draw one standard normal number per sample, float32 `[S]`."""
        return self._normals(purpose, self.sample_ids_S, torch.zeros_like(self.sample_ids_S))[0]

    def normal_TC(self, purpose: str, channels: int) -> Tensor:
        """Draw standard normal noise for every row held here, float32 `[T, channels]`."""
        blocks = -(-channels // 4)
        element = self.layout.token_index_T[:, None] * blocks + torch.arange(blocks, device=self.layout.device)
        ids = self.sample_ids_S[self.layout.segment_ids_T][:, None]
        return torch.stack(self._normals(purpose, ids, element), -1).flatten(1)[:, :channels]

    def _normals(self, purpose: str, ids: Tensor, element: Tensor) -> tuple[Tensor, ...]:
        u0, u1, u2, u3 = (_unit(w) for w in self._words(purpose, ids, element))
        radius0, radius1 = (-2 * u0.log()).sqrt(), (-2 * u2.log()).sqrt()
        angle0, angle1 = 2 * math.pi * u1, 2 * math.pi * u3
        return radius0 * angle0.cos(), radius0 * angle0.sin(), radius1 * angle1.cos(), radius1 * angle1.sin()
