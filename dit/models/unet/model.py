"""Imagen's regular UNet, on pictures `[N, C, H, W]`."""

from collections import OrderedDict
from itertools import count
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.init import ZEROS
from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.layers.convolution import Convolution, GroupNorm, TransposedConvolution
from dit.layers.dropout import Dropout
from dit.layers.picture_blocks import AttentionBlock, AttentionSizes, BlockConditions
from dit.models.base import Stage
from dit.models.imagen_network import ImagenBlock, ImagenNetwork
from dit.models.unet.config import UNetConfig


class Step(nn.Module):
    """A residual block, attention and resampling by 2, each optional."""

    def __init__(
        self,
        block: Optional[ImagenBlock] = None,
        attention: Optional[nn.Module] = None,
        resample: Optional[nn.Module] = None,
    ) -> None:
        super().__init__()
        self.block, self.attention, self.resample = block, attention, resample

    def forward(self, x_NCHW: Tensor, conditions: BlockConditions) -> Tensor:
        if self.block is not None:
            x_NCHW = self.block(x_NCHW, conditions.vector_NE, conditions.dropout_N)
        if self.attention is not None:
            x_NCHW = self.attention(x_NCHW, conditions.context_KD, conditions.texts)
        return x_NCHW if self.resample is None else self.resample(x_NCHW)


class UNet(ImagenNetwork):
    """Imagen's regular UNet, the base model and the smaller super-resolution model.

    first --> blocks, attention --> downsample --> ... --> middle --> blocks, attention --> upsample --> last
                    '-------- every output is a skip connection of one step on the way up ------'

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, appendix F; Dhariwal and Nichol 2021, arXiv:2105.05233;
    sizes and modules as in NVIDIA NeMo's Imagen.
    """

    def __init__(self, config: UNetConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, config.condition_size, provider, attention, stage)
        numbers = count()

        def block(inputs: int, outputs: int) -> ImagenBlock:
            return ImagenBlock(inputs, outputs, config, provider, dropout=Dropout(config.dropout, next(numbers)))

        def resample(convolution: nn.Module) -> nn.Sequential:
            return nn.Sequential(OrderedDict(convolution=convolution))

        def attend(channels: int) -> nn.Module:
            sizes = AttentionSizes(channels, config.text_width, config.heads(channels), config.norm_num_groups)
            return AttentionBlock(config.attention_type, sizes, provider, self.attention)

        channels = config.channels
        x, skips = channels[0], [channels[0]]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, outputs in enumerate(channels):
            attended = level in config.attention_levels
            for _ in range(config.num_res_blocks[level]):
                self.down.append(Step(block(x, outputs), attend(outputs) if attended else None))
                x = outputs
                skips.append(x)
            if level + 1 < len(channels):
                self.down.append(Step(resample=resample(Convolution(x, x, provider, stride=2))))
                skips.append(x)
        self.middle = nn.ModuleList([Step(block(x, x), attend(x)), Step(block(x, x))])
        for level, outputs in reversed(list(enumerate(channels))):
            attended = level in config.attention_levels
            for i in range(config.num_res_blocks[level] + 1):
                last = level > 0 and i == config.num_res_blocks[level]
                layers = block(x + skips.pop(), outputs), attend(outputs) if attended else None
                up = resample(TransposedConvolution(outputs, outputs, provider)) if last else None
                self.up.append(Step(*layers, up))
                x = outputs
        self.norm = GroupNorm(x, config.norm_num_groups, provider, fp32=True)
        self.last = Convolution(x, config.output_features, provider, init=ZEROS)

    def predict(self, x_NCHW: Tensor, conditions: BlockConditions) -> Tensor:
        skips = [x_NCHW]
        for step in self.down:
            skips.append(step(skips[-1], conditions))
        x_NCHW = skips[-1]
        for step in self.middle:
            x_NCHW = step(x_NCHW, conditions)
        for step in self.up:
            x_NCHW = step(torch.cat([x_NCHW, skips.pop()], 1), conditions)
        return self.last(self.norm(x_NCHW, activate=True))
