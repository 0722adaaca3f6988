"""Noise by address: every draw is a function of (seed, step, sample, purpose, element), never of a stream.

The same sample gets the same noise on every parallel layout, on every pipeline stage and after every resume, because
nothing is carried from one draw to the next. Each rank draws only the rows it holds.
"""

import zlib

import torch
from torch import Tensor

from dit.batch import SequenceLayout
from dit.philox import MASK32, Words, philox, to_normal, to_uniform


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

    def _words(self, purpose: str, ids: Tensor, element: Tensor) -> Words:
        ids, element = torch.broadcast_tensors(ids, element)
        key = ((self.seed ^ zlib.crc32(purpose.encode())) & MASK32, ((self.seed >> 32) ^ 0x5DEECE66) & MASK32)
        return philox((element, torch.full_like(element, self.step), ids & MASK32, (ids >> 32) & MASK32), key)

    def level_S(self) -> Tensor:
        """Draw the quantile of each sample's noise level, in (0, 1), float32 `[S]`."""
        return self.uniform_S("level")

    def uniform_S(self, purpose: str) -> Tensor:
        """Draw one number in (0, 1) per sample, float32 `[S]`."""
        return to_uniform(self._words(purpose, self.sample_ids_S, torch.zeros_like(self.sample_ids_S))[0])

    def normal_S(self, purpose: str) -> Tensor:
        """Draw one standard normal number per sample, float32 `[S]`."""
        return to_normal(self._words(purpose, self.sample_ids_S, torch.zeros_like(self.sample_ids_S)))[0]

    def normal_TC(self, purpose: str, channels: int) -> Tensor:
        """Draw standard normal noise for every row held here, float32 `[T, channels]`."""
        blocks = -(-channels // 4)
        element = self.layout.token_index_T[:, None] * blocks + torch.arange(blocks, device=self.layout.device)
        ids = self.sample_ids_S[self.layout.segment_ids_T][:, None]
        return torch.stack(to_normal(self._words(purpose, ids, element)), -1).flatten(1)[:, :channels]
