"""Forced weight normalisation: after every update, each row of a weight is scaled to a mean square of 1.

A row has the weights of one output. Its norm has no effect on a network that normalises its weights, but an update of
the same size rotates a row of larger norm less. A rank may have a part of a row, so squares are summed over the ranks:

    rank 0   a a a a | b b          rank 1   b b | c c c c        squares  a of rank 0, b of both, c of rank 1

Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, section 2.3 and algorithm 1. The paper scales before each step:
gradients are equal, but here the average of the weights (EMA) is that of scaled ones.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dit.backends.init import UNIT_ROWS, init_of
from dit.kernels.unit_rms import EPSILON
from dit.optimizer.master_weights import MasterShard


class UnitRows:
    """Scales the rows of parameters with the initialisation `UNIT_ROWS`; all ranks of the group of shards call it."""

    def __init__(self, shards: Sequence[MasterShard]) -> None:
        self.shards = [shard for shard in shards if init_of(shard.parameter, shard.name) == UNIT_ROWS]

    @torch.no_grad()
    def __call__(self, changes: Tensor) -> None:
        """Scale the local parts of all rows, unless `changes` is False because a bad step is skipped; bool `[]`."""
        squares = torch.cat([_squares(shard) for shard in self.shards])
        group = self.shards[0].group  # all dense parameters are sharded over the same ranks
        if group is not None:
            dist.all_reduce(squares, group=group)
        counts = [shard.parameter.shape[0] for shard in self.shards]
        for shard, squares_R in zip(self.shards, squares.split(counts)):
            size, rows, local = _rows(shard)
            rms_R = (squares_R[rows] / size).sqrt() + EPSILON
            divisor = torch.where(changes, rms_R, 1.0).repeat_interleave(size)
            shard.main.view(-1).div_(divisor[local])


def _rows(shard: MasterShard) -> tuple[int, slice, slice]:
    """Return the number of elements of a row, the rows with local elements, and these elements within these rows."""
    size = shard.parameter.shape[1:].numel()  # of the shape, because Megatron-FSDP may have freed the values
    first, last = shard.start // size, -(-shard.stop // size)
    return size, slice(first, last), slice(shard.start - first * size, shard.stop - first * size)


def _squares(shard: MasterShard) -> Tensor:
    """Return the sum of squares of the local elements of every row, `[rows]`, float32."""
    size, rows, local = _rows(shard)
    squares_R = shard.main.new_zeros(shard.parameter.shape[0])
    padded = pad(shard.main.view(-1), (local.start, -local.stop % size))
    squares_R[rows] = padded.view(-1, size).square().sum(1)
    return squares_R
