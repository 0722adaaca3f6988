"""Convolutions and group norms on pictures `[N, C, H, W]`.

Parameters have the names, the shapes and the order of torch's own modules.
"""

from typing import Optional

from torch import Tensor, nn
from torch.nn.functional import conv2d, group_norm, pad

from dit.backends.init import ONES, ZEROS, Init
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.layout import SequenceLayout


def torch_init(fan_in: int) -> Init:
    """Return the initialisation of the weights of torch's own convolutions and linear layers.

    Args:
        fan_in: inputs of each output.
    """
    return Init("uniform", fan_in**-0.5)


class Convolution(nn.Module):
    """A convolution that keeps the size of a picture, divided by the stride.

    Args:
        inputs: channels.
        outputs: channels.
        size: of the kernel in pixels, odd.
        stride: in pixels.
        bias: whether a bias is added.
        init: of the weight; as torch's if None.
        pad_after: pad on the right and below only, as latent diffusion does where it halves a picture.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        provider: LayerProvider,
        *,
        size: int = 3,
        stride: int = 1,
        bias: bool = True,
        init: Optional[Init] = None,
        pad_after: bool = False,
    ) -> None:
        super().__init__()
        self.size, self.stride, self.pad_after = size, stride, pad_after
        self.weight = provider.parameter((outputs, inputs, size, size), init or torch_init(inputs * size**2))
        self.bias = provider.parameter((outputs,), ZEROS) if bias else None

    def forward(self, x_NCHW: Tensor) -> Tensor:
        padding = self.size // 2
        if self.pad_after:
            x_NCHW, padding = pad(x_NCHW, (0, self.size - self.stride, 0, self.size - self.stride)), 0
        return conv2d(x_NCHW, self.weight, self.bias, stride=self.stride, padding=padding)


class GroupNorm(nn.Module):
    """A group norm with a learned scale and shift.

    Args:
        channels: of a picture.
        groups: of channels that are normed together.
        epsilon: added to the variance; diffusers uses 1e-6 in autoencoders and 1e-5 in UNets.
    """

    def __init__(self, channels: int, groups: int, provider: LayerProvider, *, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.epsilon = groups, epsilon
        self.weight = provider.parameter((channels,), ONES)
        self.bias = provider.parameter((channels,), ZEROS)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return group_norm(x_NCHW, self.groups, self.weight, self.bias, self.epsilon)


def as_pictures(x_TC: Tensor, batch: PackedBatch) -> Tensor:
    """Return the tokens of a pack as pictures `[N, C, H, W]`; each frame of a clip is one of its own.

    Without padding they are a channels-last view.

    Raises:
        BatchError: the samples differ in shape, or they are split over ranks.
    """
    return batch.dense(x_TC).flatten(0, 1).permute(0, 3, 1, 2)


def as_tokens(x_NCHW: Tensor, batch: PackedBatch) -> Tensor:
    """Undo `as_pictures`; padding is zeros."""
    return batch.layout.insert_padding(x_NCHW.permute(0, 2, 3, 1).flatten(0, 2))


def picture_layout(x_NCHW: Tensor) -> SequenceLayout:
    """Return the layout of all positions of pictures as tokens, row by row, one segment a picture."""
    pictures, _, height, width = x_NCHW.shape
    return SequenceLayout.from_lengths([height * width] * pictures, device=x_NCHW.device)
