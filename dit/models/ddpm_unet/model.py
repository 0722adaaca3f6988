"""The conditional DDPM UNet: a small network for pictures `[N, C, H, W]` of a few classes."""

from itertools import pairwise
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate, max_pool2d, silu

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import LABEL
from dit.kernels.attention import Attention
from dit.layers.adaln import LayerNorm
from dit.layers.convolution import Convolution, GroupNorm, as_pictures, as_tokens, picture_layout, torch_init
from dit.layers.embeddings import LabelEmbedder, timestep_features
from dit.layers.picture_blocks import pictures_of, tokens_of
from dit.models.base import Backbone, Stage
from dit.models.ddpm_unet.config import DDPMUNetConfig

NORM_EPSILON = 1e-5


class DoubleConvolution(nn.Module):
    """Convolution, norm over all channels, GELU, convolution, norm; with a residual, GELU of the sum.

    Args:
        middle: channels between the two convolutions. Default: `outputs`.
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
        x_TC = tokens_of(x_NCHW)
        q_TNH, k_TNH, v_TNH = self.to_qkv(self.norm1(x_TC)).unflatten(1, (3, self.heads, -1)).unbind(1)
        x_TC = x_TC + self.to_out(self.attention(q_TNH, k_TNH, v_TNH, layout, layout).flatten(1))
        x_TC = x_TC + self.linear2(gelu(self.linear1(self.norm2(x_TC))))
        return pictures_of(x_TC, x_NCHW)


class Block(nn.Module):
    """Two pairs of convolutions, addition of the conditioning vector, and attention.

    Args:
        middle: channels inside the second pair. Default: `outputs`.
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


TIME_SCALE = 1000.0
"""Number of timesteps between time 0 and 1."""


class DDPMUNet(Backbone):
    """Blocks with attention on the way down and up, with skip connections at every resolution.

    channels 64-128-256-256 with a middle of 256-256:

        32 x 32   first 64 ----------------------------------------------------- concat 128 --> up 64 --> last
        16 x 16     '--> down 128 ------------------------------- concat 256 --> up 64 --'
        8 x 8              '--> down 256 --------- concat 512 --> up 128 --'
        4 x 4                     '--> down 256 --> middle 256 --'

    Every block adds a projection of the conditioning vector: the sinusoid of the step plus a learned vector of the
    class or of the unconditional case.

    Source: the UNet of github.com/dome272/Diffusion-Models-pytorch, with its parameters, shapes and formulas, after Ho
    et al. 2020, arXiv:2006.11239. Deviations: a learned vector for the unconditional case, for which that code adds
    nothing; cosines come before sines; biases of linear layers are zero-initialised.
    """

    fsdp_units = (DoubleConvolution, SelfAttention)

    def __init__(self, config: DDPMUNetConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.condition_size = config.hidden_size
        channels, middle = config.block_out_channels, config.mid_out_channels

        size, heads = config.hidden_size, config.num_attention_heads

        def block(inputs: int, outputs: int, inner: int) -> Block:
            return Block(inputs, outputs, size, heads, provider, attention, middle=inner)

        self.label = None if config.num_classes is None else LabelEmbedder(config.num_classes, size, provider)
        self.first = DoubleConvolution(config.token_channels, channels[0], provider)
        self.down_blocks = nn.ModuleList(block(before, after, after) for before, after in pairwise(channels))
        self.mid_blocks = nn.ModuleList(
            DoubleConvolution(before, after, provider) for before, after in pairwise([channels[-1], *middle])
        )
        self.up_blocks, width = nn.ModuleList(), middle[-1]
        for level in reversed(range(len(channels) - 1)):
            inputs = channels[level] + width
            width = channels[max(level - 1, 0)]  # the width of the next block's skip connection
            self.up_blocks.append(block(inputs, width, inputs // 2))
        self.last = Convolution(width, config.output_features, provider, size=1)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        x_NCHW = as_pictures(inputs_TC.to(self.last.weight.dtype), batch)
        cond_SD = timestep_features(time_S.double() * TIME_SCALE, self.condition_size).to(x_NCHW.dtype)
        if self.label is not None:
            cond_SD = cond_SD + self.label(batch.conditions[LABEL.name].values)
        cond_ND = cond_SD.repeat_interleave(len(x_NCHW) // len(cond_SD), 0)
        x_NCHW, skips = self.first(x_NCHW), []
        for block in self.down_blocks:
            skips.append(x_NCHW)
            x_NCHW = block(max_pool2d(x_NCHW, 2, ceil_mode=True), cond_ND)
        for block in self.mid_blocks:
            x_NCHW = block(x_NCHW)
        for block in self.up_blocks:
            skip_NCHW = skips.pop()
            x_NCHW = interpolate(x_NCHW, skip_NCHW.shape[-2:], mode="bilinear", align_corners=True)
            x_NCHW = block(torch.cat([skip_NCHW, x_NCHW], 1), cond_ND)
        return as_tokens(self.last(x_NCHW), batch)
