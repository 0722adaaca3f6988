"""Counter-based noise: a function of its address (seed, step, sample, draw of the sample, purpose, element).

The same sample gets the same noise on every parallel layout, on every pipeline stage and after every resume, because
no generator has a state. Each rank computes the numbers of its local tokens. A sample that comes twice in one step gets
different noise each time: the data stream numbers its draws (`PackedBatch.draws_S`).
"""

import zlib
from typing import Optional

import torch
from torch import Tensor

from dit.layout import SequenceLayout
from dit.philox import MASK32, Words, philox, to_normal, to_uniform

# Odd, so that two draws of one sample never share an address (modulo 2**64), and large, so that those of two samples,
# whose ids are hashes, do no more often than the hashes.
_DRAW_STRIDE = 0x5851F42D4C957F2D


class AddressedNoise:
    """The random numbers of one micro-batch.

    Args:
        seed: seed of the run; or of each sample, int64 `[S]`.
        step: optimizer step, counted from 0.
        sample_ids_S: address of each sample, int64.
        layout: of the local tokens.
        draws_S: number of each sample's draw from the data, int64; None where a sample comes once: its noise is then
            that of draw 0.
    """

    def __init__(
        self,
        seed: int | Tensor,
        step: int,
        sample_ids_S: Tensor,
        layout: SequenceLayout,
        draws_S: Optional[Tensor] = None,
    ) -> None:
        self.seed, self.step, self.layout = seed, step, layout
        self.ids_S = sample_ids_S if draws_S is None else sample_ids_S + draws_S * _DRAW_STRIDE  # wraps modulo 2**64

    def _words(self, purpose: str, ids: Tensor, seed: int | Tensor, element: Tensor) -> Words:
        ids, element = torch.broadcast_tensors(ids, element)
        key = ((seed ^ zlib.crc32(purpose.encode())) & MASK32, ((seed >> 32) ^ 0x5DEECE66) & MASK32)
        return philox((element, torch.full_like(element, self.step), ids & MASK32, (ids >> 32) & MASK32), key)

    def _words_S(self, purpose: str) -> Words:
        return self._words(purpose, self.ids_S, self.seed, torch.zeros_like(self.ids_S))

    def level_S(self) -> Tensor:
        """Draw the quantile of each sample's noise level, in (0, 1), float32 `[S]`."""
        return self.uniform_S("level")

    def uniform_S(self, purpose: str) -> Tensor:
        """Draw one number in (0, 1) per sample, float32 `[S]`."""
        return to_uniform(self._words_S(purpose)[0])

    def keys_S(self, purpose: str) -> Tensor:
        """Draw one key per sample for counter-based numbers elsewhere, int64 `[S]` of 63 bits."""
        words = self._words_S(purpose)
        return words[0] | (words[1] >> 1) << 32

    def normal_S(self, purpose: str) -> Tensor:
        """Draw one standard normal number per sample, float32 `[S]`."""
        return to_normal(self._words_S(purpose))[0]

    def normal_TC(self, purpose: str, channels: int) -> Tensor:
        """Draw standard normal noise for every local token, float32 `[T, channels]`."""
        blocks = -(-channels // 4)
        element = self.layout.token_index_T[:, None] * blocks + torch.arange(blocks, device=self.layout.device)
        of_T1 = self.layout.segment_ids_T[:, None]
        seed = self.seed if isinstance(self.seed, int) else self.seed[of_T1]
        words = self._words(purpose, self.ids_S[of_T1], seed, element)
        return torch.stack(to_normal(words), -1).flatten(1)[:, :channels]
