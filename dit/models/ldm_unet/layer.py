"""Residual blocks and transformers of the latent-diffusion UNet, on pictures `[N, C, H, W]`.

Parameters have diffusers' names, except those listed in `dit.convert.diffusers_unet`.
"""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from dit.backends.init import ZEROS
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import POOLED, SIZE_AND_CROP, size_and_crop
from dit.kernels.attention import Attention
from dit.layers.adaln import LayerNorm
from dit.layers.convolution import GroupNorm, picture_layout, torch_init
from dit.layers.embeddings import EmbeddingMLP, timestep_features
from dit.layers.picture_blocks import BlockConditions, ResidualBlock, pictures_of, tokens_of
from dit.layout import SequenceLayout
from dit.models.ldm_unet.config import LDMUNetConfig

NORM_EPSILON, TRANSFORMER_NORM_EPSILON = 1e-5, 1e-6
LENGTHS, LENGTH_FEATURES = 6, 256
"""Number of lengths in the conditioning vector, and width of the sinusoid of each."""


class AddedEmbedding(EmbeddingMLP):
    """Linear-SiLU-Linear on a pooled text and sinusoids of six lengths, added to the conditioning vector.

    Source: Podell et al. 2023 (SDXL), arXiv:2307.01952, sections 2.1 and 2.2; diffusers' `text_time`.
    """

    def __init__(self, pooled_size: int, outputs: int, provider: LayerProvider) -> None:
        super().__init__(pooled_size + LENGTHS * LENGTH_FEATURES, outputs, outputs, provider)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return `[S, outputs]`; without the size condition, the size of the uncropped latents is used."""
        pooled_SD = batch.conditions[POOLED.name].values
        size = batch.conditions.get(SIZE_AND_CROP.name)
        if size is None:
            lengths_SL = torch.stack([size_and_crop(height, width) for _, height, width in batch.grids])
        else:
            lengths_SL = size.values
        lengths_R = lengths_SL.to(pooled_SD.device).flatten().double()
        features_SD = timestep_features(lengths_R, LENGTH_FEATURES).view(len(pooled_SD), -1)
        return self.project(torch.cat([pooled_SD.to(features_SD.dtype), features_SD], 1))


class SelfAttention(nn.Module):
    """Self-attention over the positions of a picture, with one projection for queries, keys and values, no biases."""

    def __init__(self, channels: int, heads: int, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention, init = heads, attention, torch_init(channels)
        self.to_qkv = provider.replicated_linear(channels, 3 * channels, bias=False, init=init)
        self.to_out = provider.replicated_linear(channels, channels, bias=True, init=init)

    def forward(self, x_TC: Tensor, layout: SequenceLayout) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.to_qkv(x_TC).unflatten(1, (3, self.heads, -1)).unbind(1)
        return self.to_out(self.attention(q_TNH, k_TNH, v_TNH, layout, layout).flatten(1))


class CrossAttention(nn.Module):
    """Attention of all positions of a sample to its text tokens."""

    def __init__(
        self, channels: int, context_size: int, heads: int, provider: LayerProvider, attention: Attention
    ) -> None:
        super().__init__()
        self.heads, self.attention, init = heads, attention, torch_init(channels)
        self.to_q = provider.replicated_linear(channels, channels, bias=False, init=init)
        self.to_kv = provider.replicated_linear(
            context_size, 2 * channels, bias=False, init=torch_init(context_size), gradient_covers="all_tokens"
        )
        self.to_out = provider.replicated_linear(channels, channels, bias=True, init=init)

    def forward(
        self, x_TC: Tensor, context_KD: Tensor, layout: SequenceLayout, context_layout: SequenceLayout
    ) -> Tensor:
        q_TNH = self.to_q(x_TC).unflatten(1, (self.heads, -1))
        k_KNH, v_KNH = self.to_kv(context_KD).unflatten(1, (2, self.heads, -1)).unbind(1)
        return self.to_out(self.attention(q_TNH, k_KNH, v_KNH, layout, context_layout).flatten(1))


class GatedMLP(nn.Module):
    """MLP with inner width 4 x channels, gated by GELU (GEGLU, Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, channels: int, provider: LayerProvider) -> None:
        super().__init__()
        self.proj = provider.replicated_linear(channels, 8 * channels, bias=True, init=torch_init(channels))
        self.out = provider.replicated_linear(4 * channels, channels, bias=True, init=torch_init(4 * channels))

    def forward(self, x_TC: Tensor) -> Tensor:
        y_TF, gate_TF = self.proj(x_TC).chunk(2, -1)
        return self.out(y_TF * gelu(gate_TF))


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention and gated MLP, each with a layer norm before it and a residual."""

    def __init__(self, channels: int, config: LDMUNetConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        heads = config.heads(channels)
        self.norm1 = LayerNorm(channels, provider, eps=NORM_EPSILON)
        self.attn1 = SelfAttention(channels, heads, provider, attention)
        self.norm2 = LayerNorm(channels, provider, eps=NORM_EPSILON)
        self.attn2 = CrossAttention(channels, config.text_size(), heads, provider, attention)
        self.norm3 = LayerNorm(channels, provider, eps=NORM_EPSILON)
        self.ff = GatedMLP(channels, provider)

    def forward(
        self, x_TC: Tensor, pictures: SequenceLayout, samples: SequenceLayout, conditions: BlockConditions
    ) -> Tensor:
        assert conditions.context_KD is not None  # the config requires text
        assert conditions.texts is not None
        x_TC = x_TC + self.attn1(self.norm1(x_TC), pictures)
        x_TC = x_TC + self.attn2(self.norm2(x_TC), conditions.context_KD, samples, conditions.texts)
        return x_TC + self.ff(self.norm3(x_TC))


class SpatialTransformer(nn.Module):
    """Transformer layers over the positions of a picture between two projections, initialised to the identity.

    Source: Rombach et al. 2022, arXiv:2112.10752, appendix E.2.1.
    """

    def __init__(
        self, channels: int, layers: int, config: LDMUNetConfig, provider: LayerProvider, attention: Attention
    ) -> None:
        super().__init__()
        self.norm = GroupNorm(channels, config.norm_num_groups, provider, epsilon=TRANSFORMER_NORM_EPSILON)
        self.proj_in = provider.replicated_linear(channels, channels, bias=True, init=torch_init(channels))
        self.transformer_blocks = nn.ModuleList(
            TransformerLayer(channels, config, provider, attention) for _ in range(layers)
        )
        self.proj_out = provider.replicated_linear(channels, channels, bias=True, init=ZEROS)

    def forward(self, x_NCHW: Tensor, conditions: BlockConditions) -> Tensor:
        pictures = picture_layout(x_NCHW)
        samples = SequenceLayout.from_lengths(
            [conditions.frames * pictures.max_seqlen] * (len(x_NCHW) // conditions.frames), device=x_NCHW.device
        )
        y_TC = self.proj_in(tokens_of(self.norm(x_NCHW)))
        for layer in self.transformer_blocks:
            y_TC = layer(y_TC, pictures, samples, conditions)
        return x_NCHW + pictures_of(self.proj_out(y_TC), x_NCHW)


class Blocks(nn.Module):
    """Residual blocks of one resolution, each followed by a transformer unless `transformer_layers` is 0.

    Args:
        inputs: input channels of each residual block.
        transformers: number of blocks, from the first, with a transformer; None for all.
    """

    def __init__(
        self,
        inputs: list[int],
        outputs: int,
        transformer_layers: int,
        config: LDMUNetConfig,
        provider: LayerProvider,
        attention: Attention,
        *,
        transformers: Optional[int] = None,
    ) -> None:
        super().__init__()
        groups, size = config.norm_num_groups, config.condition_size
        self.resnets = nn.ModuleList(
            ResidualBlock(width, outputs, groups, provider, epsilon=NORM_EPSILON, condition_size=size)
            for width in inputs
        )
        count = 0 if transformer_layers == 0 else len(inputs) if transformers is None else transformers
        self.attentions = nn.ModuleList(
            SpatialTransformer(outputs, transformer_layers, config, provider, attention) for _ in range(count)
        )

    def block(self, i: int, x_NCHW: Tensor, conditions: BlockConditions) -> Tensor:
        x_NCHW = self.resnets[i](x_NCHW, conditions.vector_NE)
        return self.attentions[i](x_NCHW, conditions) if i < len(self.attentions) else x_NCHW
