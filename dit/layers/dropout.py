"""Counter-based dropout: each mask element is a function of (key of the sample, layer, element).

A key encodes (seed, step, sample, draw), see `PackedBatch.draw_keys_S`. Masks do not depend on the layout, and
recomputed activations get the same masks.
"""

from typing import Optional

import torch
from torch import Tensor, nn

from dit.philox import MASK32, philox, to_uniform

_PURPOSE = (0x6A09E667, 0xBB67AE85)


class Dropout(nn.Module):
    """Set a fraction of the activations to zero in training, and scale the others up.

    Args:
        layer: number of this layer in its network, so that layers have different masks.
    """

    def __init__(self, rate: float, layer: int) -> None:
        super().__init__()
        self.rate, self.layer = rate, layer

    def forward(self, x_NCHW: Tensor, keys_N: Optional[Tensor]) -> Tensor:
        """Drop activations of pictures.

        Args:
            keys_N: key of each picture, int64; None disables dropout, outside training.
        """
        if not self.rate or keys_N is None:
            return x_NCHW
        elements = x_NCHW[0].numel()
        blocks = torch.arange(-(-elements // 4), device=x_NCHW.device)
        words = philox(
            # Blocks come second, because torch 2.13 truncates compiled multiples of an arange to 32 bits.
            torch.broadcast_tensors(
                torch.full_like(blocks, self.layer),
                blocks,
                (keys_N & MASK32)[:, None],
                (keys_N >> 32 & MASK32)[:, None],
            ),
            _PURPOSE,
        )
        uniform_NE = torch.stack([to_uniform(word) for word in words], -1).flatten(1)[:, :elements]
        mask = uniform_NE.view(len(x_NCHW), *x_NCHW.shape[1:]) >= self.rate
        return torch.where(mask, x_NCHW / (1 - self.rate), 0.0)
