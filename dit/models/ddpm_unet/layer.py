"""Blocks of the conditional DDPM UNet, on pictures `[N, C, H, W]`."""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate, max_pool2d, silu

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.layers.adaln import LayerNorm
from dit.layers.convolution import Convolution, GroupNorm, picture_layout, torch_init

NORM_EPSILON = 1e-5


class DoubleConvolution(nn.Module):
    """Convolution, norm over all channels, GELU, convolution, norm; with a residual, GELU of the sum.

    Args:
        middle: channels between the two convolutions. Default: `outputs`.
        residual: whether to add the input.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        provider: LayerProvider,
        *,
        middle: Optional[int] = None,
        residual: bool = False,
    ) -> None:
        super().__init__()
        middle, self.residual = middle or outputs, residual
        self.conv1 = Convolution(inputs, middle, provider, bias=False)
        self.norm1 = GroupNorm(middle, 1, provider, epsilon=NORM_EPSILON)
        self.conv2 = Convolution(middle, outputs, provider, bias=False)
        self.norm2 = GroupNorm(outputs, 1, provider, epsilon=NORM_EPSILON)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y_NCHW = self.norm2(self.conv2(gelu(self.norm1(self.conv1(x_NCHW)))))
        return gelu(x_NCHW + y_NCHW) if self.residual else y_NCHW


class SelfAttention(nn.Module):
    """A transformer layer over all positions of a picture, whose MLP keeps the width."""

    def __init__(self, channels: int, heads: int, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        init = xavier_uniform(channels, 3 * channels)
        self.norm1 = LayerNorm(channels, provider, eps=NORM_EPSILON)
        self.to_qkv = provider.replicated_linear(channels, 3 * channels, bias=True, init=init)
        self.norm2 = LayerNorm(channels, provider, eps=NORM_EPSILON)
        self.to_out, self.linear1, self.linear2 = (
            provider.replicated_linear(channels, channels, bias=True, init=torch_init(channels)) for _ in range(3)
        )

    def forward(self, x_NCHW: Tensor) -> Tensor:
        layout = picture_layout(x_NCHW)
        x_NhwC = x_NCHW.permute(0, 2, 3, 1)
        x_TC = x_NhwC.flatten(0, 2)
        q_TNH, k_TNH, v_TNH = self.to_qkv(self.norm1(x_TC)).unflatten(1, (3, self.heads, -1)).unbind(1)
        x_TC = x_TC + self.to_out(self.attention(q_TNH, k_TNH, v_TNH, layout, layout).flatten(1))
        x_TC = x_TC + self.linear2(gelu(self.linear1(self.norm2(x_TC))))
        return x_TC.view(x_NhwC.shape).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Two pairs of convolutions, addition of the conditioning vector, and attention.

    Args:
        condition_size: width of the conditioning vector.
        middle: channels inside the second pair. Default: `outputs`.
        heads: attention heads.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        condition_size: int,
        heads: int,
        provider: LayerProvider,
        attention: Attention,
        *,
        middle: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.residual = DoubleConvolution(inputs, inputs, provider, residual=True)
        self.convolutions = DoubleConvolution(inputs, outputs, provider, middle=middle)
        self.condition = provider.replicated_linear(condition_size, outputs, bias=True, init=torch_init(condition_size))
        self.attention = SelfAttention(outputs, heads, provider, attention)

    def forward(self, x_NCHW: Tensor, cond_ND: Tensor) -> Tensor:
        y_NCHW = self.convolutions(self.residual(x_NCHW))
        return self.attention(y_NCHW + self.condition(silu(cond_ND))[:, :, None, None])


def halved(x_NCHW: Tensor) -> Tensor:
    """Return 2 x 2 max pooling of pictures; odd sides are rounded up."""
    return max_pool2d(x_NCHW, 2, ceil_mode=True)


def concat_skip(x_NCHW: Tensor, skip_NCHW: Tensor) -> Tensor:
    """Resize pictures bilinearly (aligned corners) to the size of the skip connection, and concatenate both."""
    enlarged_NCHW = interpolate(x_NCHW, skip_NCHW.shape[-2:], mode="bilinear", align_corners=True)
    return torch.cat([skip_NCHW, enlarged_NCHW], 1)
