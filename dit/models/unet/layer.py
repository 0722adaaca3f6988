"""Residual blocks and resampling of Imagen's regular UNet, on pictures `[N, C, H, W]`."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.layers.convolution import Convolution, TransposedConvolution
from dit.layers.dropout import Dropout
from dit.layers.picture_blocks import ConditionedBranch
from dit.models.unet.config import UNetConfig


class ResidualBlock(nn.Module):
    """A conditioned branch plus a shortcut, which is a projection if the number of channels changes.

    Args:
        number: number of this block in its network, for dropout.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: UNetConfig,
        provider: LayerProvider,
        *,
        number: int,
    ) -> None:
        super().__init__()
        self.branch = ConditionedBranch(
            inputs,
            outputs,
            config.vector_size,
            config.norm_num_groups,
            provider,
            dropout=Dropout(config.dropout, number),
        )
        self.shortcut = None if inputs == outputs else Convolution(inputs, outputs, provider, size=1)

    def forward(self, x_NCHW: Tensor, vector_NE: Tensor, dropout_N: Optional[Tensor]) -> Tensor:
        y_NCHW = self.branch(x_NCHW, vector_NE, dropout_N)
        return (x_NCHW if self.shortcut is None else self.shortcut(x_NCHW)) + y_NCHW


class Downsample(nn.Module):
    """Downsampling by 2: a 3 x 3 convolution with stride 2."""

    def __init__(self, channels: int, provider: LayerProvider) -> None:
        super().__init__()
        self.convolution = Convolution(channels, channels, provider, stride=2)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.convolution(x_NCHW)


class Upsample(nn.Module):
    """Upsampling by 2: a 4 x 4 transposed convolution with stride 2."""

    def __init__(self, channels: int, provider: LayerProvider) -> None:
        super().__init__()
        self.convolution = TransposedConvolution(channels, channels, provider)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.convolution(x_NCHW)
