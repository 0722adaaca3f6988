"""Blocks of UNets and autoencoders on pictures: residual blocks, and attention over positions and text.

Norms have float32 weights and arithmetic, even in bf16 models, except those of `ResidualBlock`.

Shape suffixes: pictures `[N, C, H, W]`, E width of the conditioning vector, T positions of all pictures, K text tokens
of all pictures, D width of the text tokens.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from dit.backends.init import ONES, ZEROS
from dit.backends.provider import LayerProvider
from dit.joint_layout import joint_layout
from dit.kernels.attention import Attention
from dit.layers.convolution import Convolution, GroupNorm, picture_layout, torch_init
from dit.layers.dropout import Dropout
from dit.layout import SequenceLayout

AttentionKind = Literal["self", "cross", "fused", "stacked"]


@dataclass(frozen=True)
class BlockConditions:
    """Inputs of the blocks of a UNet other than the pictures.

    Attributes:
        context_KD: text tokens of the samples, normalised for the attention blocks of this file; None without text.
        dropout_N: dropout key of each picture; None disables dropout.
    """

    vector_NE: Tensor
    context_KD: Optional[Tensor]
    texts: Optional[SequenceLayout]
    dropout_N: Optional[Tensor] = None
    frames: int = 1


class ConditionedBranch(nn.Module):
    """Two convolutions after group norms, with the conditioning vector in between; the second is zero-initialised.

    norm, SiLU, convolution --> norm, scale and shift --> SiLU, dropout, convolution
                                              vector ---'

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, figures A.27 and A.30; scale and shift: Dhariwal and Nichol
    2021, arXiv:2105.05233, section 3.1 (AdaGN).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        vector_size: int,
        groups: int,
        provider: LayerProvider,
        *,
        dropout: Optional[Dropout] = None,
    ) -> None:
        super().__init__()
        self.norm_1 = GroupNorm(inputs, groups, provider, fp32=True)
        self.convolution_1 = Convolution(inputs, outputs, provider)
        self.vector = provider.replicated_linear(vector_size, 2 * outputs, bias=True, init=torch_init(vector_size))
        self.norm_2 = GroupNorm(outputs, groups, provider, fp32=True)
        self.dropout = dropout
        self.convolution_2 = Convolution(outputs, outputs, provider, init=ZEROS)

    def forward(self, x_NCHW: Tensor, vector_NE: Tensor, dropout_N: Optional[Tensor]) -> Tensor:
        y_NCHW = self.convolution_1(self.norm_1(x_NCHW, activate=True))
        y_NCHW = self.norm_2(y_NCHW, *self.vector(silu(vector_NE)).chunk(2, 1), activate=True)
        if self.dropout is not None:
            y_NCHW = self.dropout(y_NCHW, dropout_N)
        return self.convolution_2(y_NCHW)


class ResidualBlock(nn.Module):
    """Two convolutions after group norms and SiLU, plus a shortcut, which is a projection if the channels change.

    Args:
        condition_size: width of a conditioning vector, whose projection is added between the convolutions. The second
            is then zero-initialised, so the block starts as the shortcut. None for no vector.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        groups: int,
        provider: LayerProvider,
        *,
        epsilon: float,
        condition_size: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.norm1 = GroupNorm(inputs, groups, provider, epsilon=epsilon)
        self.conv1 = Convolution(inputs, outputs, provider)
        self.condition: Optional[nn.Linear] = None
        if condition_size is not None:
            init = torch_init(condition_size)
            self.condition = provider.replicated_linear(condition_size, outputs, bias=True, init=init)
        self.norm2 = GroupNorm(outputs, groups, provider, epsilon=epsilon)
        self.conv2 = Convolution(outputs, outputs, provider, init=None if condition_size is None else ZEROS)
        self.conv_shortcut = None if inputs == outputs else Convolution(inputs, outputs, provider, size=1)

    def forward(self, x_NCHW: Tensor, cond_ND: Optional[Tensor] = None) -> Tensor:
        y_NCHW = self.conv1(self.norm1(x_NCHW, activate=True))
        if self.condition is not None:
            assert cond_ND is not None
            y_NCHW = y_NCHW + self.condition(silu(cond_ND))[:, :, None, None]
        y_NCHW = self.conv2(self.norm2(y_NCHW, activate=True))
        return (x_NCHW if self.conv_shortcut is None else self.conv_shortcut(x_NCHW)) + y_NCHW


class TextNormAffine(nn.Module):
    """Learned scale and shift of text tokens that `dit.layers.caption` normalised, in float32."""

    def __init__(self, channels: int, provider: LayerProvider) -> None:
        super().__init__()
        self.weight = provider.parameter((channels,), ONES, dtype=torch.float32)
        self.bias = provider.parameter((channels,), ZEROS, dtype=torch.float32)

    def forward(self, x_KD: Tensor) -> Tensor:
        return x_KD.float() * self.weight + self.bias


def tokens_of(x_NCHW: Tensor) -> Tensor:
    """Return the positions of all pictures as tokens `[T, C]`; channels-last pictures are not copied."""
    return x_NCHW.permute(0, 2, 3, 1).flatten(0, 2)


def pictures_of(x_TC: Tensor, like_NCHW: Tensor) -> Tensor:
    """Return tokens `[T, C]` as pictures of the size of `like_NCHW`, the inverse of `tokens_of`."""
    pictures, _, height, width = like_NCHW.shape
    return x_TC.view(pictures, height, width, -1).permute(0, 3, 1, 2)


class AttentionSizes(NamedTuple):
    """Channels of the picture, width of the text tokens (None without text), heads, and groups of the norms."""

    channels: int
    context_size: Optional[int]
    num_heads: int
    groups: int


class PictureAttention(nn.Module):
    """Attention of the positions of a picture to each other (self), to the text (cross), or to both at once (fused).

    self     q, k, v of the normalised picture
    cross    q of the normalised picture, k and v of the normalised text
    fused    q of the normalised picture; k and v of the picture after a second norm, and of the normalised text

    The output projection is zero-initialised, and its result is added to the picture.

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, section 2.4 and appendix D.3.1 (cross-attention by
    concatenating the text to keys and values); NVIDIA NeMo's Imagen for the norms.
    """

    def __init__(
        self,
        kind: Literal["self", "cross", "fused"],
        sizes: AttentionSizes,
        provider: LayerProvider,
        attention: Attention,
    ) -> None:
        super().__init__()
        channels, context_size, self.num_heads, groups = sizes
        self.kind, self.attention = kind, attention

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return provider.replicated_linear(inputs, outputs, bias=True, init=torch_init(inputs))

        self.norm = GroupNorm(channels, groups, provider, fp32=True)
        self.to_q = linear(channels, channels)
        if kind != "cross":
            self.to_kv = linear(channels, 2 * channels)
        if kind == "fused":
            self.norm_kv = GroupNorm(channels, groups, provider, fp32=True)
        if kind != "self":
            assert context_size is not None
            self.norm_context = TextNormAffine(context_size, provider)
            self.context_to_kv = linear(context_size, 2 * channels)
        self.to_out = provider.replicated_linear(channels, channels, bias=True, init=ZEROS)

    def forward(self, x_NCHW: Tensor, context_KD: Optional[Tensor], texts: Optional[SequenceLayout]) -> Tensor:
        layout = picture_layout(x_NCHW)
        normed_TC = tokens_of(self.norm(x_NCHW))
        layout_kv = layout
        if self.kind == "self":
            kv_KC = self.to_kv(normed_TC)
        else:
            assert context_KD is not None
            assert texts is not None
            kv_KC, layout_kv = self.context_to_kv(self.norm_context(context_KD).to(x_NCHW.dtype)), texts
            if self.kind == "fused":
                layout_kv = joint = joint_layout(texts, layout)
                kv_KC = joint.join(kv_KC, self.to_kv(tokens_of(self.norm_kv(x_NCHW))))
        q_TNH, k_KNH, v_KNH = (
            x.unflatten(-1, (self.num_heads, -1)) for x in (self.to_q(normed_TC), *kv_KC.chunk(2, -1))
        )
        out_TC = self.attention(q_TNH, k_KNH, v_KNH, layout, layout_kv).flatten(1)
        return x_NCHW + pictures_of(self.to_out(out_TC), x_NCHW)


class GatedFeedForward(nn.Module):
    """x + Linear(value * GELU(gate)), where value and gate, each 4 x channels wide, are projections of norm(x).

    Source: Shazeer 2020, arXiv:2002.05202 (GEGLU); position in the block: Rombach et al. 2022, arXiv:2112.10752.
    """

    def __init__(self, channels: int, groups: int, provider: LayerProvider) -> None:
        super().__init__()
        self.norm = GroupNorm(channels, groups, provider, fp32=True)
        self.linear_1 = provider.replicated_linear(channels, 8 * channels, bias=True, init=torch_init(channels))
        self.linear_2 = provider.replicated_linear(4 * channels, channels, bias=True, init=torch_init(4 * channels))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        value_TF, gate_TF = self.linear_1(tokens_of(self.norm(x_NCHW))).chunk(2, -1)
        return x_NCHW + pictures_of(self.linear_2(value_TF * gelu(gate_TF)), x_NCHW)


class StackedAttention(nn.Module):
    """Self-attention, cross-attention and feed-forward between two projections; the last is zero-initialised.

    Source: Rombach et al. 2022, arXiv:2112.10752, the spatial transformer; NVIDIA NeMo's Imagen for the norms.
    """

    def __init__(self, sizes: AttentionSizes, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        channels, groups, common = sizes.channels, sizes.groups, (sizes, provider, attention)
        self.norm = GroupNorm(channels, groups, provider, fp32=True)
        self.to_inner = provider.replicated_linear(channels, channels, bias=True, init=torch_init(channels))
        self.self_attention = PictureAttention("self", *common)
        self.cross_attention = PictureAttention("cross", *common)
        self.feed_forward = GatedFeedForward(channels, groups, provider)
        self.to_out = provider.replicated_linear(channels, channels, bias=True, init=ZEROS)

    def forward(self, x_NCHW: Tensor, context_KD: Optional[Tensor], texts: Optional[SequenceLayout]) -> Tensor:
        y_NCHW = pictures_of(self.to_inner(tokens_of(self.norm(x_NCHW))), x_NCHW)
        y_NCHW = self.self_attention(y_NCHW, None, None)
        y_NCHW = self.feed_forward(self.cross_attention(y_NCHW, context_KD, texts))
        return x_NCHW + pictures_of(self.to_out(tokens_of(y_NCHW)), x_NCHW)


class AttentionBlock(nn.Module):
    """An attention block of any kind, as the unit of FSDP and recompute."""

    def __init__(
        self, kind: AttentionKind, sizes: AttentionSizes, provider: LayerProvider, attention: Attention
    ) -> None:
        super().__init__()
        common = sizes, provider, attention
        self.inner = StackedAttention(*common) if kind == "stacked" else PictureAttention(kind, *common)

    def forward(self, x_NCHW: Tensor, context_KD: Optional[Tensor], texts: Optional[SequenceLayout]) -> Tensor:
        return self.inner(x_NCHW, context_KD, texts)
