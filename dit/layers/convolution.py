"""Convolutions and group norms on pictures `[N, C, H, W]`.

Parameters have the names, the shapes and the order of torch's own modules.
"""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, conv_transpose2d, pad

from dit.backends.init import ONES, ZEROS, Init
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.group_norm import Groups
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
        size: of the kernel in pixels; odd, or even with a stride of 2.
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
        padding = (self.size - self.stride + 1) // 2
        if self.pad_after:
            x_NCHW, padding = pad(x_NCHW, (0, self.size - self.stride, 0, self.size - self.stride)), 0
        return conv2d(x_NCHW, self.weight, self.bias, stride=self.stride, padding=padding)


class TransposedConvolution(nn.Module):
    """A transposed convolution of 4 x 4 with stride 2, which doubles the size of a picture.

    Args:
        inputs: channels.
        outputs: channels.
    """

    def __init__(self, inputs: int, outputs: int, provider: LayerProvider) -> None:
        super().__init__()
        # Each output sees 2 x 2 of the 4 x 4 taps; the bound of torch's own counts all of them, of the outputs.
        self.weight = provider.parameter((inputs, outputs, 4, 4), torch_init(16 * outputs))
        self.bias = provider.parameter((outputs,), ZEROS)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return conv_transpose2d(x_NCHW, self.weight, self.bias, stride=2, padding=1)


class GroupNorm(nn.Module):
    """A group norm with a learned scale and shift.

    Args:
        channels: of a picture.
        groups: of channels that are normed together.
        epsilon: added to the variance; diffusers uses 1e-6 in autoencoders and 1e-5 in UNets.
        fp32: weights and arithmetic are float32, also in a bf16 model.
    """

    def __init__(
        self, channels: int, groups: int, provider: LayerProvider, *, epsilon: float = 1e-5, fp32: bool = False
    ) -> None:
        super().__init__()
        self.groups, self.epsilon, self.kernels = groups, epsilon, provider.kernels
        dtype = torch.float32 if fp32 else None
        self.weight = provider.parameter((channels,), ONES, dtype=dtype)
        self.bias = provider.parameter((channels,), ZEROS, dtype=dtype)

    def forward(
        self,
        x_NCHW: Tensor,
        scale_NC: Optional[Tensor] = None,
        shift_NC: Optional[Tensor] = None,
        *,
        activate: bool = False,
    ) -> Tensor:
        """Return the normed pictures, times 1 + scale, plus shift, under SiLU: as far as they are asked for."""
        groups = Groups(self.weight, self.bias, self.groups, self.epsilon)
        return self.kernels.norm_groups(x_NCHW, groups, scale_NC, shift_NC, activate=activate)


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
