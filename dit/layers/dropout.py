"""Counter-based dropout of activations: what is dropped is a function of (key of the sample, layer, element).

A key stands for (seed, step, sample, draw), see `PackedBatch.dropout_S`. Masks do not depend on the layout, and are the
same where activations are recomputed.
"""

from typing import Optional

import torch
from torch import Tensor, nn

from dit.philox import MASK32, philox, to_uniform

_PURPOSE = (0x6A09E667, 0xBB67AE85)


class Dropout(nn.Module):
    """Set a share of the activations to zero in training, and scale the others up.

    Args:
        share: of the activations that are dropped.
        place: number of this layer in its network, so that no two layers drop alike.
    """

    def __init__(self, share: float, place: int) -> None:
        super().__init__()
        self.share, self.place = share, place

    def forward(self, x_NCHW: Tensor, keys_N: Optional[Tensor]) -> Tensor:
        """Drop activations of pictures.

        Args:
            keys_N: key of each picture, int64; None outside training, where nothing is dropped.
        """
        if not self.share or keys_N is None:
            return x_NCHW
        elements = x_NCHW[0].numel()
        blocks = torch.arange(-(-elements // 4), device=x_NCHW.device)
        words = philox(
            # Blocks come second: in torch 2.13, compiled multiples of an arange are cut to 32 bits.
            torch.broadcast_tensors(
                torch.full_like(blocks, self.place),
                blocks,
                (keys_N & MASK32)[:, None],
                (keys_N >> 32 & MASK32)[:, None],
            ),
            _PURPOSE,
        )
        uniform_NE = torch.stack([to_uniform(word) for word in words], -1).flatten(1)[:, :elements]
        passes = uniform_NE.view(len(x_NCHW), *x_NCHW.shape[1:]) >= self.share
        return torch.where(passes, x_NCHW / (1 - self.share), 0.0)
