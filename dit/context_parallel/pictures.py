"""Convolutions of each channel over the pictures of a pack, with or without context parallelism.

Each frame of a sample is a picture, and its tokens are a channels-last view. Under context parallelism, an all-to-all
exchanges all channels of the local tokens for some channels of all tokens before the convolution, and back after it:

    rank 0: channels x y of tokens 0 1   --dispatch-->   channel x of tokens 0 1 2 3   --combine-->   x y of tokens 0 1
    rank 1: channels x y of tokens 2 3                   channel y of tokens 0 1 2 3                  x y of tokens 2 3

A rank sends (T/c) (c-1)/c elements of each channel in each direction, with T tokens and c ranks.

Shape suffixes: T tokens, N groups of channels, C channels of a group.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from dit.context_parallel.attention import ContextAttention, heads_for_tokens, tokens_for_heads
from dit.context_parallel.partition import context_partition
from dit.context_parallel.segments import Grids
from dit.errors import ConfigError
from dit.kernels.attention import Attention
from dit.layout import SequenceLayout


def check_channels(count: int, attention: Attention) -> None:
    """Check that context parallelism can split the groups of channels of a tensor-parallel rank."""
    size = attention.group.size() if isinstance(attention, ContextAttention) else 1
    if count % size:
        raise ConfigError(
            f"the depthwise convolution has {count} pairs of channels on a tensor-parallel rank, which cannot be split "
            f"over context_parallel_size={size}; use a divisor, or change model.ffn_hidden_size"
        )


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of a pack; `context` is the attention of this process under context parallelism, else None."""

    layout: SequenceLayout
    grids: Grids
    context: Optional[ContextAttention] = None

    @classmethod
    def of_pack(cls, layout: SequenceLayout, grids: Grids, attention: Attention) -> "Pictures":
        """Return the pictures of the pack that `layout` is a part of."""
        return cls(layout.plain, grids, attention if isinstance(attention, ContextAttention) else None)

    @cached_property
    def runs(self) -> list[tuple[slice, tuple[int, int]]]:
        """Contiguous tokens of pictures of one size, and their height and width, on the host."""
        runs: list[tuple[slice, tuple[int, int]]] = []
        for start, length, (_, height, width) in zip(self.layout.starts, self.layout.lengths, self.grids):
            stop = start + length
            if runs and (runs[-1][0].stop, runs[-1][1]) == (start, (height, width)):
                start = runs.pop()[0].start
            runs.append((slice(start, stop), (height, width)))
        return runs

    @cached_property
    def _order(self) -> Optional[tuple[Tensor, Tensor]]:
        assert self.context is not None
        size = self.context.group.size()
        return context_partition(self.layout, size, self.context.split).order(0, size)

    def dispatch(self, x_TNC: Tensor) -> Tensor:
        """Return the local groups of channels of all tokens."""
        if self.context is None:
            return x_TNC
        return tokens_for_heads([x_TNC], self.context.group, self._order)[0]

    def combine(self, x_TNC: Tensor) -> Tensor:
        """Return all groups of channels of the local tokens, the inverse of `dispatch`."""
        return x_TNC if self.context is None else heads_for_tokens(x_TNC, self.context.group, self._order)

    def convolve(self, x_TC: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Convolve each local channel of all tokens.

        Args:
            weight: `[channels, 1, size, size]` of all channels before `dispatch`, with an odd size.
            bias: `[channels]` of the same.
        """
        if self.context is not None:
            size, rank = self.context.group.size(), self.context.group.rank()
            weight, bias = (x.chunk(size)[rank] for x in (weight, bias))
        parts = []
        for tokens, sides in self.runs:
            x_NCHW = x_TC[tokens].view(-1, *sides, x_TC.shape[1]).permute(0, 3, 1, 2)
            y_NCHW = conv2d(x_NCHW, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))
            parts.append(y_NCHW.permute(0, 2, 3, 1).flatten(0, 2))
        return self.layout.insert_padding(parts[0] if len(parts) == 1 else torch.cat(parts))
