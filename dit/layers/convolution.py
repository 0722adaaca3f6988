"""Convolutions and group norms on pictures `[N, C, H, W]`.

Parameters have the names, shapes and order of torch's modules.
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
    """Return the default weight initialisation of torch's convolutions and linear layers."""
    return Init("uniform", fan_in**-0.5)


class Convolution(nn.Module):
    """A convolution whose padding keeps the size of a picture, up to the stride.

    With an even kernel and a stride of 1, the output is one pixel smaller.

    Args:
        pad_after: pad only on the right and at the bottom, as the downsampling layers of latent diffusion do.
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
        padding = (self.size - 1) // 2
        if self.pad_after:
            x_NCHW, padding = pad(x_NCHW, (0, self.size - self.stride, 0, self.size - self.stride)), 0
        return conv2d(x_NCHW, self.weight, self.bias, stride=self.stride, padding=padding)


class TransposedConvolution(nn.Module):
    """A 4 x 4 transposed convolution with stride 2, which doubles the size of a picture."""

    def __init__(self, inputs: int, outputs: int, provider: LayerProvider) -> None:
        super().__init__()
        # Each output depends on only 2 x 2 of the 4 x 4 taps, but torch's fan-in is all taps times output channels.
        self.weight = provider.parameter((inputs, outputs, 4, 4), torch_init(16 * outputs))
        self.bias = provider.parameter((outputs,), ZEROS)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return conv_transpose2d(x_NCHW, self.weight, self.bias, stride=2, padding=1)


class GroupNorm(nn.Module):
    """A group norm with a learned scale and shift.

    Args:
        epsilon: added to the variance; diffusers uses 1e-6 in autoencoders and 1e-5 in UNets.
        fp32: whether weights and arithmetic are float32 even in a bf16 model.
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
        """Return SiLU(norm(x) * (1 + scale) + shift); scale, shift and SiLU are optional."""
        groups = Groups(self.weight, self.bias, self.groups, self.epsilon)
        return self.kernels.norm_groups(x_NCHW, groups, scale_NC, shift_NC, activate=activate)


def as_pictures(x_TC: Tensor, batch: PackedBatch) -> Tensor:
    """Return the tokens of a pack as pictures `[N, C, H, W]`; each frame of a clip is a separate picture.

    Without padding, the result is a channels-last view.
    """
    return batch.dense(x_TC).flatten(0, 1).permute(0, 3, 1, 2)


def as_tokens(x_NCHW: Tensor, batch: PackedBatch) -> Tensor:
    """Return pictures as tokens of a pack, the inverse of `as_pictures`; padding is zero."""
    return batch.layout.insert_padding(x_NCHW.permute(0, 2, 3, 1).flatten(0, 2))


def picture_layout(x_NCHW: Tensor) -> SequenceLayout:
    """Return the layout of the positions of pictures as tokens, with one segment per picture."""
    pictures, _, height, width = x_NCHW.shape
    return SequenceLayout.from_lengths([height * width] * pictures, device=x_NCHW.device)
