"""Counter-based noise: a function of its address (seed, step, sample, draw of the sample, purpose, element).

The same sample gets the same noise on every parallel layout, on every pipeline stage and after every resume, because
no generator has a state. Each rank computes the numbers of its local tokens. A sample that comes twice in one step gets
different noise each time: the data stream numbers its draws (`PackedBatch.draws_S`).
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Optional, Protocol

import torch
from torch import Tensor

from dit.layout import SequenceLayout
from dit.philox import MASK32, Words, philox, to_normal, to_uniform

# Odd, so that two draws of one sample never share an address (modulo 2**64), and large, so that those of two samples,
# whose ids are hashes, do no more often than the hashes.
_DRAW_STRIDE = 0x5851F42D4C957F2D


_KEY_WORD = 0x5DEECE66

Pairs = Sequence[tuple[Tensor, Tensor]]


class Mix(Protocol):
    """Draws `normal_TC` and mixes it with clean latents, without writing it to memory."""

    def __call__(
        self,
        x0_TC: Tensor,
        layout: SequenceLayout,
        ids_S: Tensor,
        seed: int | Tensor,
        words: tuple[int, int],
        step: int,
        pairs: Pairs,
    ) -> list[Tensor]:
        """Return a x0 + b noise, float32 `[T, C]`, for each pair of numbers `[S]`.

        Args:
            words: exclusive or the lower and the upper word of the seed, they are the key.
        """


class AddressedNoise:
    """The random numbers of one micro-batch.

    Args:
        seed: seed of the run; or of each sample, int64 `[S]`.
        step: optimizer step, counted from 0.
        sample_ids_S: address of each sample, int64.
        layout: of the local tokens.
        draws_S: number of each sample's draw from the data, int64; None where a sample comes once: its noise is then
            that of draw 0.
        mix: kernel for `mix_TC`; None for none.
        latent_channels: of a latent; the features of a token are those of its positions, one position behind another.
            None for one position.
    """

    def __init__(
        self,
        seed: int | Tensor,
        step: int,
        sample_ids_S: Tensor,
        layout: SequenceLayout,
        draws_S: Optional[Tensor] = None,
        mix: Optional[Mix] = None,
        latent_channels: Optional[int] = None,
    ) -> None:
        self.seed, self.step, self.layout, self.mix = seed, step, layout, mix
        self.latent_channels = latent_channels
        self.ids_S = sample_ids_S if draws_S is None else sample_ids_S + draws_S * _DRAW_STRIDE  # wraps modulo 2**64
        self._low_S, self._high_S = self.ids_S & MASK32, (self.ids_S >> 32) & MASK32
        self._steps_S, self._first_S = torch.full_like(self.ids_S, step), torch.zeros_like(self.ids_S)

    def _key(self, purpose: str, seed: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
        return (seed ^ zlib.crc32(purpose.encode())) & MASK32, ((seed >> 32) ^ _KEY_WORD) & MASK32

    def _words_S(self, purpose: str) -> Words:
        return philox((self._first_S, self._steps_S, self._low_S, self._high_S), self._key(purpose, self.seed))

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

    def normal_SC(self, purpose: str, columns: int) -> Tensor:
        """Draw one standard normal number per sample and channel, float32 `[S, columns]`, equal at all positions."""
        channels = self.latent_channels or columns
        block = torch.arange(-(-channels // 4), device=self.layout.device)
        seed = self.seed if isinstance(self.seed, int) else self.seed[:, None]
        counter = (block, self._steps_S[:, None], self._low_S[:, None], self._high_S[:, None])
        e, s, low, high = torch.broadcast_tensors(*counter)
        words = philox((e, s, low, high), self._key(purpose, seed))
        return torch.stack(to_normal(words), -1).flatten(1)[:, :channels].repeat(1, columns // channels)

    def mix_TC(
        self, purpose: str, x0_TC: Tensor, pairs: Callable[[], Pairs], offset_SC: Optional[Tensor] = None
    ) -> Optional[Sequence[Tensor]]:
        """Return a x0 + b `normal_TC` for each pair (a, b) of numbers `[S]`, float32; None if no kernel does it."""
        if self.mix is None:
            return None
        words = zlib.crc32(purpose.encode()), _KEY_WORD
        mixed = self.mix(x0_TC, self.layout, self.ids_S, self.seed, words, self.step, pairs())
        if offset_SC is None:
            return mixed
        return [x_TC + self.layout.per_token(b_S[:, None] * offset_SC) for x_TC, (_, b_S) in zip(mixed, pairs())]

    def normal_TC(self, purpose: str, channels: int, offset_SC: Optional[Tensor] = None) -> Tensor:
        """Draw standard normal noise for every local token, float32 `[T, channels]`; add the offset of its sample."""
        blocks = -(-channels // 4)
        element = self.layout.token_index_T[:, None] * blocks + torch.arange(blocks, device=self.layout.device)
        of_T1 = self.layout.segment_ids_T[:, None]
        seed = self.seed if isinstance(self.seed, int) else self.seed[of_T1]
        counter = (element, self._steps_S[0], self._low_S[of_T1], self._high_S[of_T1])
        e, s, low, high = torch.broadcast_tensors(*counter)
        words = philox((e, s, low, high), self._key(purpose, seed))
        eps_TC = torch.stack(to_normal(words), -1).flatten(1)[:, :channels]
        return eps_TC if offset_SC is None else eps_TC + self.layout.per_token(offset_SC)
