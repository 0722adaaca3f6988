"""Counter-based noise, a function of (seed, step, sample, draw of the sample, purpose, element), and its mixing.

A sample gets the same noise on every parallel layout, on every pipeline stage and after a resume, because no generator
has a state. Each rank computes the numbers of its local tokens. If a sample occurs twice in one step, the two have
different noise, because the data stream numbers its draws (`PackedBatch.draws_S`).

Objectives compute coefficients per noise level, of which a sample has one or several (`dit.levels`), and
`AddressedNoise.mix` applies them to latents and noise. Three functions implement it: `mix_eagerly` (the reference), the
kernel in `dit.kernels.fused.noise`, and `skip_mixing`.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Optional

import torch
from torch import Tensor

from dit.errors import ConfigError
from dit.layout import CLEAN, SequenceLayout
from dit.philox import MASK32, Words, philox, to_normal, to_uniform

# Odd, so that two draws of one sample never share an address (modulo 2**64). Large, so that draws of two samples, whose
# ids are hashes, collide no more often than the hashes.
_DRAW_STRIDE = 0x5851F42D4C957F2D
_KEY_WORD = 0x5DEECE66

LATENT_NOISE = "eps"
"""Purpose of the noise that corrupts the latents."""
Mixture = tuple[Tensor | float, Tensor | float]
"""Coefficients (a, b) of a x0 + b eps: a number per noise level, float32 `[L]`, or one number for all of them."""
NoiseMixer = Callable[["AddressedNoise", Tensor, Sequence[Mixture], Optional[Tensor]], list[Tensor]]
"""Implementation of `AddressedNoise.mix`: from (noise, x0_TC, mixtures, offset_SC) to one tensor per mixture."""


class AddressedNoise:
    """The random numbers of one micro-batch.

    Args:
        step: optimizer step, counted from 0; a tensor, int64 `[]`, in a step that a CUDA graph repeats.
        sample_ids_S: address of each sample, int64.
        draws_S: number of each sample's draw from the data, int64; None for draw 0 of every sample.
        mixer: implementation of `mix`; None for `mix_eagerly`.
        latent_channels: channels of a latent. The features of a token are those of its positions in order; None if a
            token is one position.
    """

    def __init__(
        self,
        seed: int | Tensor,
        step: int | Tensor,
        sample_ids_S: Tensor,
        layout: SequenceLayout,
        draws_S: Optional[Tensor] = None,
        mixer: Optional[NoiseMixer] = None,
        latent_channels: Optional[int] = None,
    ) -> None:
        self.seed, self.step, self.layout = seed, step, layout
        self.mixer = mix_eagerly if mixer is None else mixer
        self.latent_channels = latent_channels
        self.ids_S = sample_ids_S if draws_S is None else sample_ids_S + draws_S * _DRAW_STRIDE  # wraps modulo 2**64
        self._low_S, self._high_S = self.ids_S & MASK32, (self.ids_S >> 32) & MASK32
        self._steps_S = step.expand_as(self.ids_S) if isinstance(step, Tensor) else torch.full_like(self.ids_S, step)
        self._first_S = torch.zeros_like(self.ids_S)

    @property
    def step_1(self) -> Tensor:
        """Step on the device, int64 `[1]`; the value of a tensor may change between two uses of a CUDA graph."""
        return self._steps_S[:1]

    def key(self, purpose: str, seed: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
        """Return the two words of the Philox key of a purpose."""
        return (seed ^ zlib.crc32(purpose.encode())) & MASK32, ((seed >> 32) ^ _KEY_WORD) & MASK32

    def _words_S(self, purpose: str) -> Words:
        return philox((self._first_S, self._steps_S, self._low_S, self._high_S), self.key(purpose, self.seed))

    def level_S(self) -> Tensor:
        """Draw the quantile of each sample's noise level, in (0, 1), float32 `[S]`."""
        if self.layout.levels is not None:
            raise ConfigError(
                "the samples have several noise levels, such as clean first frames, and this objective has one per "
                "sample; use objective=flow_matching, edm or ddpm, or data without data.clean_first_frame, "
                "data.frame_levels, data.inpaint and data.references"
            )
        return self.quantile_S(0)

    def level_L(self) -> Tensor:
        """Draw the quantile of each noise level of the pack, float32 `[L]`; 0 for clean segments."""
        levels = self.layout.levels
        if levels is None:
            return self.quantile_S(0)
        quantile_L = torch.zeros(len(levels.numbers), device=self.layout.device)
        for number in sorted(set(levels.numbers) - {CLEAN}):
            drawn_L = self.layout.per_level(self.quantile_S(number))
            quantile_L = torch.where(levels.numbers_L == number, drawn_L, quantile_L)
        return quantile_L

    def quantile_S(self, number: int) -> Tensor:
        """Draw the quantile of one noise level of each sample, see `Levels.numbers`."""
        return self.uniform_S(f"level {number}" if number else "level")

    def uniform_S(self, purpose: str) -> Tensor:
        """Draw one number in (0, 1) per sample, float32 `[S]`."""
        return to_uniform(self._words_S(purpose)[0])

    def keys_S(self, purpose: str) -> Tensor:
        """Draw one key per sample for counter-based numbers elsewhere, int64 `[S]` of 63 bits."""
        words = self._words_S(purpose)
        return words[0] | (words[1] >> 1) << 32

    def normal_SC(self, purpose: str, columns: int, *, repeated: bool = True) -> Tensor:
        """Draw standard normal numbers of each sample, float32 `[S, columns]`.

        If `repeated`, one number per channel of a latent is drawn and repeated for the positions of a token.
        """
        channels = self.latent_channels or columns if repeated else columns
        block = torch.arange(-(-channels // 4), device=self.layout.device)
        return self._normal(purpose, block, lambda x_S: x_S[:, None], channels).repeat(1, columns // channels)

    def mix(self, x0_TC: Tensor, *mixtures: Mixture, offset_SC: Optional[Tensor] = None) -> list[Tensor]:
        """Return a x0 + b (eps + offset) for each pair (a, b), float32 `[T, C]`; eps is standard normal noise."""
        return self.mixer(self, x0_TC, mixtures, offset_SC)

    def normal_TC(self, purpose: str, channels: int) -> Tensor:
        """Draw standard normal noise for every local token, float32 `[T, channels]`."""
        blocks = -(-channels // 4)
        element = self.layout.token_index_T[:, None] * blocks + torch.arange(blocks, device=self.layout.device)
        of_T1 = self.layout.segment_ids_T[:, None]
        return self._normal(purpose, element, lambda x_S: x_S[of_T1], channels)

    def _normal(self, purpose: str, element: Tensor, per_row: Callable[[Tensor], Tensor], columns: int) -> Tensor:
        """Draw four numbers for each element, up to `columns` in a row; `per_row` expands numbers of samples."""
        seed = self.seed if isinstance(self.seed, int) else per_row(self.seed)
        counter = (element, self._steps_S[0], per_row(self._low_S), per_row(self._high_S))
        e, s, low, high = torch.broadcast_tensors(*counter)
        words = philox((e, s, low, high), self.key(purpose, seed))
        return torch.stack(to_normal(words), -1).flatten(1)[:, :columns]


def mix_eagerly(
    noise: AddressedNoise, x0_TC: Tensor, mixtures: Sequence[Mixture], offset_SC: Optional[Tensor]
) -> list[Tensor]:
    """Draw the noise, then mix it with the latents: the reference of `AddressedNoise.mix` on every device."""
    per_token = noise.layout.level_layout.per_token
    x0_TC, eps_TC = x0_TC.float(), noise.normal_TC(LATENT_NOISE, x0_TC.shape[-1])
    if offset_SC is not None:
        eps_TC = eps_TC + noise.layout.per_token(offset_SC)

    def scaled(x_TC: Tensor, coefficient: Tensor | float) -> Tensor:
        return x_TC * (per_token(coefficient) if isinstance(coefficient, Tensor) else coefficient)

    return [scaled(x0_TC, a) + scaled(eps_TC, b) for a, b in mixtures]


def skip_mixing(
    noise: AddressedNoise, x0_TC: Tensor, mixtures: Sequence[Mixture], offset_SC: Optional[Tensor]
) -> list[Tensor]:
    """Return the latents: pipeline stages between the first and the last use neither inputs nor targets."""
    return [x0_TC] * len(mixtures)
