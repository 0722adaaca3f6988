"""Depthwise convolution over the pictures of a pack, with or without context parallelism.

Each frame of a sample is a picture; its tokens are viewed as channels-last. Under context parallelism, an all-to-all
exchanges all channels of the local tokens for some channels of all tokens before the convolution, and back after it:

    rank 0: channels x y of tokens 0 1   --dispatch-->   channel x of tokens 0 1 2 3   --combine-->   x y of tokens 0 1
    rank 1: channels x y of tokens 2 3                   channel y of tokens 0 1 2 3                  x y of tokens 2 3

A rank sends (T/c) (c-1)/c elements of each channel in each direction, with T tokens and c ranks.

Shape suffixes: T tokens, N groups of channels, C channels (with N: of a group), K positions of the 3 x 3 kernel.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import conv2d, pad

from dit.batch import PackedBatch
from dit.context_parallel.attention import ContextAttention, Order, heads_for_tokens, tokens_for_heads
from dit.context_parallel.segments import Grids
from dit.kernels.attention import Attention
from dit.layout import SequenceLayout


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of a pack.

    Attributes:
        layout: layout of all tokens of the pack.
        grids: (t, h, w) of each sample in patches, on the host.
        grids_S3: the same as a tensor, for packs of fixed size.
        group: context-parallel ranks; None for one rank.
        order: order of their tokens.
    """

    layout: SequenceLayout
    grids: Grids
    grids_S3: Optional[Tensor] = None
    group: Optional[ProcessGroup] = None
    order: Order = None

    @classmethod
    def of_pack(cls, batch: PackedBatch, attention: Attention) -> "Pictures":
        """Return the pictures of the global pack; `batch` has only the local tokens."""
        if not isinstance(attention, ContextAttention):
            return cls(batch.layout, batch.grids, batch.grids_S3)
        group, partition = attention.group, attention.partition(batch.layout)
        [layout] = partition.blocks(group.size())
        return cls(layout, batch.grids, batch.grids_S3, group, partition.order(0, group.size()))

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
    def neighbours(self) -> Tensor:
        """Indices of the 3 x 3 tokens around each token, int64 `[9, T]`; T for those outside of the picture."""
        assert self.grids_S3 is not None
        layout, tokens = self.layout, self.layout.total_tokens
        # Clamp, because padding may belong to an empty sample, whose height and width are 0.
        _, height_T, width_T = self.grids_S3[layout.segment_ids_T].clamp(min=1).unbind(1)
        steps = torch.arange(-1, 2, device=layout.device)
        row_3T = layout.token_index_T // width_T % height_T + steps[:, None]
        column_3T = layout.token_index_T % width_T + steps[:, None]
        rows_3T, columns_3T = ((x >= 0) & (x < n) for x, n in ((row_3T, height_T), (column_3T, width_T)))
        inside_33T = rows_3T[:, None] & columns_3T & layout.valid_T
        index_33T = torch.arange(tokens, device=layout.device) + steps[:, None, None] * width_T + steps[:, None]
        return torch.where(inside_33T, index_33T, tokens).flatten(0, 1)

    def dispatch(self, x_TNC: Tensor) -> Tensor:
        """Return the local groups of channels of all tokens."""
        return x_TNC if self.group is None else tokens_for_heads([x_TNC], self.group, self.order)[0]

    def combine(self, x_TNC: Tensor) -> Tensor:
        """Return all groups of channels of the local tokens, the inverse of `dispatch`."""
        return x_TNC if self.group is None else heads_for_tokens(x_TNC, self.group, self.order)

    def convolve(self, x_TC: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Convolve each local channel of all tokens.

        Args:
            weight: `[channels, 1, 3, 3]` for the channels before `dispatch`, from which each rank takes its own.
            bias: `[channels]`, likewise.
        """
        if self.group is not None:
            weight, bias = (x.chunk(self.group.size())[self.group.rank()] for x in (weight, bias))
        if self.layout.is_fixed:
            out_TC: Tensor = _NeighbourSum.apply(x_TC, weight.flatten(1), bias, self.neighbours)
            return out_TC
        parts = []
        for tokens, sides in self.runs:
            x_NCHW = x_TC[tokens].view(-1, *sides, x_TC.shape[1]).permute(0, 3, 1, 2)
            y_NCHW = conv2d(x_NCHW, weight, bias, padding=1, groups=len(weight))
            parts.append(y_NCHW.permute(0, 2, 3, 1).flatten(0, 2))
        return self.layout.insert_padding(parts[0] if len(parts) == 1 else torch.cat(parts))


class _NeighbourSum(torch.autograd.Function):
    """Convolution with a table of neighbours, whose shapes do not depend on the sizes of pictures.

    Sums are float32. Padding gets the bias, because it has no neighbours; nothing reads it.
    """

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor, neighbours_KT: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CK, neighbours_KT)
        return _neighbour_sum(x_TC, weight_CK, bias_C, neighbours_KT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        x_TC, weight_CK, neighbours_KT = ctx.saved_tensors
        # Where j is the neighbour k of i, i is the neighbour 8 - k of j.
        dx_TC = _neighbour_sum(grads[0], weight_CK.flip(1), torch.zeros_like(weight_CK[:, 0]), neighbours_KT)
        if not ctx.needs_input_grad[1]:  # adapters are trained, not the convolution
            return dx_TC, None, None, None
        rows = pad(x_TC, (0, 0, 0, 1))
        dweight = [(rows[index_T].float() * grads[0]).sum(0) for index_T in neighbours_KT]
        return dx_TC, torch.stack(dweight, 1).to(weight_CK.dtype), grads[0].sum(0), None


def _neighbour_sum(x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor, neighbours_KT: Tensor) -> Tensor:
    rows = pad(x_TC, (0, 0, 0, 1))  # the last is that of neighbours outside of the picture
    sum_TC = bias_C.float().repeat(len(x_TC), 1)
    for index_T, weight_C in zip(neighbours_KT, weight_CK.T):
        sum_TC.addcmul_(rows[index_T], weight_C)
    return sum_TC.to(x_TC.dtype)
