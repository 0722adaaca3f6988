"""Imagen's Efficient UNet, on pictures `[N, C, H, W]`."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.layers.convolution import Convolution, TransposedConvolution
from dit.layers.picture_blocks import AttentionBlock, AttentionSizes, BlockConditions
from dit.models.base import Stage
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.imagen_network import ImagenBlock, ImagenNetwork


class Level(nn.Module):
    """The blocks of one level, on the way down or up.

    Args:
        inputs, outputs: channels; the first block changes their number.
        level: number of the level, from 0 at the full size.
        before, after: resampling before and after the blocks, or None.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        level: int,
        config: EfficientUNetConfig,
        provider: LayerProvider,
        attention: Attention,
        *,
        before: Optional[nn.Module] = None,
        after: Optional[nn.Module] = None,
    ) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.blocks = nn.ModuleList(
            ImagenBlock(outputs if i else inputs, outputs, config, provider, scaled=True)
            for i in range(config.num_res_blocks[level])
        )
        self.attention: Optional[nn.Module] = None
        if level in config.attention_levels:
            sizes = AttentionSizes(outputs, config.text_width, config.heads(outputs), config.norm_num_groups)
            self.attention = AttentionBlock(config.attention_type, sizes, provider, attention)

    def forward(self, x_NCHW: Tensor, conditions: BlockConditions) -> Tensor:
        if self.before is not None:
            x_NCHW = self.before(x_NCHW)
        for block in self.blocks:
            x_NCHW = block(x_NCHW, conditions.vector_NE)
        if self.attention is not None:
            x_NCHW = self.attention(x_NCHW, conditions.context_KD, conditions.texts)
        return x_NCHW if self.after is None else self.after(x_NCHW)


class EfficientUNet(ImagenNetwork):
    """Imagen's Efficient UNet, for super-resolution.

    first --> downsample, blocks (level 0) --> ... --> last level --> blocks, upsample (level 0) --> last
                        '------ the output is added to the input of the same level -----'

    The last level has no resampling.

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, section 2.5 and figures A.28 to A.30; sizes and modules as
    in NVIDIA NeMo's Imagen.
    """

    def __init__(
        self, config: EfficientUNetConfig, provider: LayerProvider, attention: Attention, stage: Stage
    ) -> None:
        super().__init__(config, config.text_width or 0, provider, attention, stage)
        shared = config, provider, self.attention
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, (channels, outputs_up) in enumerate(zip(config.channels, config.outputs_up)):
            inputs, is_last = config.channels[max(level - 1, 0)], level + 1 == len(config.channels)
            before = None if is_last else Convolution(inputs, inputs, provider, size=4, stride=2)
            after = None if is_last else TransposedConvolution(outputs_up, outputs_up, provider)
            self.down.append(Level(inputs, channels, level, *shared, before=before))
            self.up.append(Level(channels, outputs_up, level, *shared, after=after))
        self.last = Convolution(config.channels[0], config.output_features, provider, size=1)

    def predict(self, x_NCHW: Tensor, conditions: BlockConditions) -> Tensor:
        outputs = []
        for level in self.down:
            x_NCHW = level(x_NCHW, conditions)
            outputs.append(x_NCHW)
        for i in reversed(range(len(self.up))):
            x_NCHW = x_NCHW if i == len(outputs) - 1 else x_NCHW + outputs[i]
            x_NCHW = self.up[i](x_NCHW, conditions)
        return self.last(x_NCHW)
