"""Imagen's Efficient UNet."""

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.layers.convolution import Convolution
from dit.layers.picture_blocks import AttentionBlock, BlockConditions
from dit.models.base import Stage
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.efficient_unet.layer import ResidualBlock, down_level, up_level
from dit.models.imagen_network import ImagenNetwork, select_attention


class EfficientUNet(ImagenNetwork):
    """Imagen's Efficient UNet, for super-resolution.

    first --> downsample, blocks (level 0) --> ... --> last level --> blocks, upsample (level 0) --> last
                        '------ the output is added to the input of the same level -----'

    Source: Saharia et al. 2022 (Imagen), arXiv:2205.11487, section 2.5 and figures A.28 to A.30; sizes and modules as
    in NVIDIA NeMo's Imagen.
    """

    fsdp_units = (ResidualBlock, AttentionBlock)
    compiled_units = (ResidualBlock,)

    def __init__(
        self, config: EfficientUNetConfig, provider: LayerProvider, attention: Attention, stage: Stage
    ) -> None:
        super().__init__(config, config.text_width or 0, provider, stage)
        selected, levels = select_attention(config, attention), range(len(config.channels))
        self.down = nn.ModuleList(down_level(level, config, provider, selected) for level in levels)
        self.up = nn.ModuleList(up_level(level, config, provider, selected) for level in levels)
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
