"""Magnitude-preserving layers and blocks of the EDM2 UNet, on pictures `[N, C, H, W]`.

Each layer keeps the expected square of its activations: inputs of mean square 1 give outputs of mean square 1.

Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, config G; equations and settings in its appendix B.
"""

import math
from typing import Literal, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d, interpolate, linear, silu

from dit.backends.init import UNIT_ROWS, ZEROS
from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.kernels.unit_rms import unit_rms
from dit.layers.convolution import picture_layout
from dit.layers.picture_blocks import pictures_of, tokens_of
from dit.models.edm2_unet.config import EDM2UNetConfig

Way = Literal["down", "up"]

RESIDUAL_SHARE = 0.3
"""Weight of a residual branch; that of the other operand is the rest."""
SKIP_SHARE = 0.5
"""Weight of a skip connection among concatenated channels."""
LIMIT = 256.0
"""Largest absolute activation after a block."""
SILU_RMS = 0.596
"""Root mean square of SiLU of a standard normal variable."""


def mp_silu(x: Tensor) -> Tensor:
    """Return SiLU, scaled to unit mean square for a standard normal input (Eq. 81)."""
    return silu(x) / SILU_RMS


def mp_sum(a: Tensor, b: Tensor, share: float) -> Tensor:
    """Return (1 - share) a + share b, scaled so that the sum of independent inputs keeps their mean square (Eq. 88)."""
    return torch.lerp(a, b, share) / math.hypot(1 - share, share)


def mp_cat(a_NCHW: Tensor, b_NCHW: Tensor, share: float = SKIP_SHARE) -> Tensor:
    """Concatenate channels; the squares of `a` and `b` have the shares (1 - share)^2 to share^2 (Eq. 103)."""
    a, b = a_NCHW.shape[1], b_NCHW.shape[1]
    scale = math.sqrt(a + b) / math.hypot(1 - share, share)
    return torch.cat([a_NCHW * (scale * (1 - share) / math.sqrt(a)), b_NCHW * (scale * share / math.sqrt(b))], 1)


class UnitWeight(nn.Module):
    """A linear layer or a convolution without bias, whose filter for each output has norm 1.

    The gradient passes through the normalisation, and each update scales the stored filters to unit mean square again
    (`dit.optimizer.unit_rows`), so the size of an update relative to the weight depends only on the learning rate.

    Args:
        size: width of a convolution; None for a linear layer.
    """

    def __init__(self, inputs: int, outputs: int, provider: LayerProvider, *, size: Optional[int] = None) -> None:
        super().__init__()
        window = () if size is None else (size, size)
        self.weight = provider.parameter((outputs, inputs, *window), UNIT_ROWS)

    def scaled(self, gain: Tensor | float = 1.0) -> Tensor:
        """Return the filters with norm `gain`, in the precision of the stored ones."""
        weight = unit_rms(self.weight.float(), tuple(range(1, self.weight.dim())))
        return (weight * (gain / math.sqrt(weight[0].numel()))).to(self.weight.dtype)

    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        weight = self.scaled(gain)
        return linear(x, weight) if weight.dim() == 2 else conv2d(x, weight, padding=weight.shape[-1] // 2)


class SelfAttention(nn.Module):
    """Attention of all positions of a picture, with queries, keys and values of unit mean square in each head."""

    def __init__(self, channels: int, head_size: int, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        self.head_size, self.attention = head_size, attention
        self.to_qkv = UnitWeight(channels, 3 * channels, provider)
        self.to_out = UnitWeight(channels, channels, provider)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        layout = picture_layout(x_NCHW)
        heads = self.to_qkv(tokens_of(x_NCHW)).unflatten(1, (3, -1, self.head_size))
        q_TNH, k_TNH, v_TNH = unit_rms(heads, -1).unbind(1)
        out_TC = self.to_out(self.attention(q_TNH, k_TNH, v_TNH, layout, layout).flatten(1))
        return mp_sum(x_NCHW, pictures_of(out_TC, x_NCHW), RESIDUAL_SHARE)


class Block(nn.Module):
    """Resampling, a residual branch that the conditioning vector scales, and attention.

    down    resample -> shortcut -> unit mean square per pixel -+-> branch --+--> attention -> limit
                                                                '------------+
    up      resample -+-> branch ---+--> attention -> limit
                      '-> shortcut -+

    branch: SiLU, convolution, scale by the vector, SiLU, convolution.

    Args:
        way: which half of the network the block is in.
        resample: whether a block down halves the picture, and a block up doubles it.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: EDM2UNetConfig,
        provider: LayerProvider,
        attention: Attention,
        *,
        way: Way,
        resample: bool = False,
        attends: bool = False,
    ) -> None:
        super().__init__()
        self.way, self.resample = way, resample
        self.shortcut = nn.Identity() if inputs == outputs else UnitWeight(inputs, outputs, provider, size=1)
        self.convolution_1 = UnitWeight(outputs if way == "down" else inputs, outputs, provider, size=3)
        self.condition = UnitWeight(config.condition_size, outputs, provider)
        self.gain = provider.parameter((1,), ZEROS, dtype=torch.float32)
        self.convolution_2 = UnitWeight(outputs, outputs, provider, size=3)
        self.attention = SelfAttention(outputs, config.head_size, provider, attention) if attends else None

    def forward(self, x_NCHW: Tensor, cond_NE: Tensor) -> Tensor:
        if self.resample:
            x_NCHW = avg_pool2d(x_NCHW, 2) if self.way == "down" else interpolate(x_NCHW, scale_factor=2)
        if self.way == "down":
            x_NCHW = unit_rms(self.shortcut(x_NCHW), 1)
        scale_NC = 1 + self.condition(cond_NE, self.gain)
        y_NCHW = self.convolution_1(mp_silu(x_NCHW)) * scale_NC[:, :, None, None]
        y_NCHW = self.convolution_2(mp_silu(y_NCHW))
        if self.way == "up":
            x_NCHW = self.shortcut(x_NCHW)
        x_NCHW = mp_sum(x_NCHW, y_NCHW, RESIDUAL_SHARE)
        if self.attention is not None:
            x_NCHW = self.attention(x_NCHW)
        return x_NCHW.clamp(-LIMIT, LIMIT)
