"""Convolutions, residual blocks, attention and codebook of the autoencoder, on pictures `[N, C, H, W]`.

Parameters have diffusers' names, except those listed in `dit.convert.diffusers_autoencoder`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, Optional

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import embedding, interpolate

from dit.backends.init import uniform
from dit.backends.provider import LayerProvider
from dit.kernels.attention import segment_sdpa
from dit.layers.convolution import Convolution, GroupNorm, picture_layout, torch_init
from dit.layers.picture_blocks import ResidualBlock, pictures_of, tokens_of

NORM_EPSILON = 1e-6


class AttentionBlock(nn.Module):
    """Single-head attention over all positions of a picture."""

    def __init__(self, channels: int, groups: int, provider: LayerProvider) -> None:
        super().__init__()
        self.group_norm = GroupNorm(channels, groups, provider, epsilon=NORM_EPSILON)
        self.to_q, self.to_k, self.to_v, self.to_out = (
            provider.replicated_linear(channels, channels, bias=True, init=torch_init(channels)) for _ in range(4)
        )

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y_TC, layout = tokens_of(self.group_norm(x_NCHW)), picture_layout(x_NCHW)
        # Pictures of a batch have equal sizes, so attention is dense; other kernels do not support one wide head.
        q_T1C, k_T1C, v_T1C = (linear(y_TC)[:, None] for linear in (self.to_q, self.to_k, self.to_v))
        y_TC = self.to_out(segment_sdpa(q_T1C, k_T1C, v_T1C, layout, layout)[:, 0])
        return x_NCHW + pictures_of(y_TC, x_NCHW)


class MidBlock(nn.Module):
    """A residual block, optional attention, and a residual block, at the resolution of the latent."""

    def __init__(self, channels: int, groups: int, provider: LayerProvider, *, attention: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResidualBlock(channels, channels, groups, provider, epsilon=NORM_EPSILON) for _ in range(2)
        )
        self.attentions = nn.ModuleList([AttentionBlock(channels, groups, provider)] if attention else [])

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x_NCHW = self.resnets[0](x_NCHW)
        for attention in self.attentions:
            x_NCHW = attention(x_NCHW)
        return self.resnets[1](x_NCHW)


Resample = Literal["down", "up"]


class Resolution(nn.Module):
    """The residual blocks of one resolution, then optional downsampling (encoder) or upsampling (decoder)."""

    def __init__(
        self, inputs: int, outputs: int, layers: int, groups: int, provider: LayerProvider, resample: Optional[Resample]
    ) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResidualBlock(outputs if i else inputs, outputs, groups, provider, epsilon=NORM_EPSILON)
            for i in range(layers)
        )
        self.downsampler = (
            Convolution(outputs, outputs, provider, stride=2, pad_after=True) if resample == "down" else None
        )
        self.upsampler = Convolution(outputs, outputs, provider) if resample == "up" else None

    def forward(self, x_NCHW: Tensor) -> Tensor:
        for block in self.resnets:
            x_NCHW = block(x_NCHW)
        if self.downsampler is not None:
            return self.downsampler(x_NCHW)
        return x_NCHW if self.upsampler is None else self.upsampler(interpolate(x_NCHW, scale_factor=2.0))


def resolutions(
    channels: Sequence[int], layers: int, groups: int, provider: LayerProvider, resample: Resample
) -> nn.ModuleList:
    """Build the resolutions of an encoder or a decoder, in the order of `channels`, with resampling between them."""
    steps = [(channels[0], channels[0]), *pairwise(channels)]
    last = len(steps) - 1
    return nn.ModuleList(
        Resolution(before, after, layers, groups, provider, None if i == last else resample)
        for i, (before, after) in enumerate(steps)
    )


class Codebook(nn.Module):
    """Replaces each vector by the nearest entry of a learned codebook.

    The gradient of the result passes unchanged to the vector (straight-through), and none reaches the entries; the
    objective trains these. Entries are float32 even in a model of half precision.

    Source: van den Oord et al. 2017, arXiv:1711.00937, Eq. 1-3; initial entries: Esser et al. 2021, arXiv:2012.09841.
    """

    def __init__(self, size: int, channels: int, provider: LayerProvider) -> None:
        super().__init__()
        self.entries = provider.parameter((size, channels), uniform(1 / size), dtype=torch.float32)

    def forward(self, z_NCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the quantised vectors, the entries with their gradient, and their indices `[N, 1, H, W]`."""
        pictures, channels, height, width = z_NCHW.shape
        with torch.no_grad():
            z_TC = z_NCHW.permute(0, 2, 3, 1).reshape(-1, channels)
            # |z - e|**2 - |z|**2: the second term is the same for all entries.
            code_T = torch.addmm(self.entries.square().sum(1), z_TC, self.entries.T, alpha=-2).argmin(1)
        entries_NCHW = embedding(code_T.view(pictures, height, width), self.entries).permute(0, 3, 1, 2)
        quantized_NCHW = z_NCHW + (entries_NCHW - z_NCHW).detach()
        return quantized_NCHW, entries_NCHW, code_T.view(pictures, 1, height, width)


def to_pictures(tokens_NhwC: Tensor, token_side: int) -> Tensor:
    """Return pictures `[N, C, H, W]` of tokens, which have `token_side` pixels in height and width."""
    return rearrange(tokens_NhwC, "n h w (ph pw c) -> n c (h ph) (w pw)", ph=token_side, pw=token_side)
