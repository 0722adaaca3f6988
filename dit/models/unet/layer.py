"""Residual blocks and resampling of Imagen's regular UNet, on pictures `[N, C, H, W]`."""

from typing import Literal, Optional

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from dit.backends.provider import LayerProvider
from dit.layers.convolution import Convolution, TransposedConvolution
from dit.layers.dropout import Dropout
from dit.layers.picture_blocks import ConditionedBranch
from dit.models.unet.config import UNetConfig

Resample = Literal["down", "up"]


class Halve(nn.Module):
    """2 x 2 average pooling."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return avg_pool2d(x_NCHW, 2)


class ResidualBlock(nn.Module):
    """A conditioned branch plus a shortcut, which is a projection if the number of channels changes.

    Args:
        number: number of this block in its network, for dropout.
        resample: direction of resampling on both branches, or None.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: UNetConfig,
        provider: LayerProvider,
        *,
        number: int,
        resample: Optional[Resample] = None,
    ) -> None:
        super().__init__()

        def resampled() -> Optional[nn.Module]:
            if resample is None:
                return None
            return Halve() if resample == "down" else TransposedConvolution(inputs, inputs, provider)

        self.branch = ConditionedBranch(
            inputs,
            outputs,
            config.vector_size,
            config.norm_num_groups,
            provider,
            scale_shift=config.scale_shift_norm,
            resample=resampled(),
            dropout=Dropout(config.dropout, number),
        )
        self.resample = resampled()
        self.shortcut = None if inputs == outputs else Convolution(inputs, outputs, provider, size=1)

    def forward(self, x_NCHW: Tensor, vector_NE: Tensor, dropout_N: Optional[Tensor]) -> Tensor:
        y_NCHW = self.branch(x_NCHW, vector_NE, dropout_N)
        if self.resample is not None:
            x_NCHW = self.resample(x_NCHW)
        return (x_NCHW if self.shortcut is None else self.shortcut(x_NCHW)) + y_NCHW


class Downsample(nn.Module):
    """Downsampling by 2: a 3 x 3 convolution with stride 2, or average pooling."""

    def __init__(self, channels: int, config: UNetConfig, provider: LayerProvider) -> None:
        super().__init__()
        learned = config.resampling == "conv"
        self.convolution = Convolution(channels, channels, provider, stride=2) if learned else None

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return avg_pool2d(x_NCHW, 2) if self.convolution is None else self.convolution(x_NCHW)


class Upsample(nn.Module):
    """Upsampling by 2: a 4 x 4 transposed convolution with stride 2."""

    def __init__(self, channels: int, provider: LayerProvider) -> None:
        super().__init__()
        self.convolution = TransposedConvolution(channels, channels, provider)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.convolution(x_NCHW)
