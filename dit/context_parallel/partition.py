"""The context-parallel partition of a pack, which assigns tokens to ranks.

Every sample is split into equal chunks, padding included. With c ranks, `contiguous` assigns the r-th of c chunks to
rank r. `load_balanced` assigns chunks r and 2c - 1 - r of 2c chunks to it (the order of Megatron-Core and Transformer
Engine, which balances causal masks). The tail pad is split into c equal parts.

Two samples of 8 and 5 tokens, each padded to 8, on c = 4 ranks (`.` is padding):

    global pack      a0 a1 a2 a3 a4 a5 a6 a7   b0 b1 b2 b3 b4 .  .  .
    contiguous       -0-- -1-- -2-- -3--       -0-- -1-- -2-- -3--        rank of each chunk
    load_balanced    0  1  2  3  3  2  1  0    0  1  2  3  3  2  1  0

    contiguous,    local to rank 1: a2 a3 b2 b3        lengths (2, 2)
                   local to rank 2: a4 a5 b4 .         lengths (2, 1), each padded to 2
    load_balanced, local to rank 0: a0 a7 b0 .         lengths (2, 1)

Local tokens stay in ascending order, so the real tokens of each sample come before its padding, and the local tokens
are again a pack, with shorter samples (some may be empty).

Shape suffixes: T tokens, S samples (or finer segments), R context-parallel ranks, B blocks of adjacent ranks.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Optional, Protocol

import torch
from torch import Tensor

from dit.errors import BatchError
from dit.joint_layout import JointLayout
from dit.layout import SequenceLayout, to_device

ContextSplit = Literal["contiguous", "load_balanced"]


def chunks_per_sample(size: int, split: ContextSplit) -> int:
    """Return the number of chunks that every sample is split into."""
    return size if split == "contiguous" else 2 * size


def check_split(layout: SequenceLayout, size: int, split: ContextSplit) -> None:
    """Check that every sample and the tail pad can be split into equal chunks."""
    chunks, tail = chunks_per_sample(size, split), layout.total_tokens - sum(layout.padded_lengths)
    uneven = sorted({n for n in layout.padded_lengths if n % chunks})
    if uneven or tail % size:
        raise BatchError(
            f"context_parallel_size={size} with the {split} split divides every sample into {chunks} chunks and the "
            f"tail pad into {size}, but samples have {uneven or 'fitting'} padded tokens and the tail {tail}; "
            f"pad samples to a multiple of {chunks} (BatchSpec.multiple_of) and the pack to a multiple of {size}"
        )


class Partition(Protocol):
    """Layouts of the tokens of adjacent ranks, and their order."""

    @property
    def size(self) -> int: ...

    def blocks(self, ranks_per_block: int = 1) -> tuple[SequenceLayout, ...]:
        """Return the layout of the tokens of each block of adjacent ranks, as one pack; samples may be empty."""

    def order(self, block: int, ranks_per_block: int) -> Optional[tuple[Tensor, Tensor]]:
        """Return the permutation from rank-by-rank order to ascending order, and its inverse, int64.

        None if it is the identity, as for one sample under the contiguous split, unless the pack has a fixed size.
        """


class TokenPartition:
    """Local tokens of each rank, and their layouts as packs; a `Partition`.

    Args:
        indices_RT: global indices of each rank's tokens, ascending, int64; every rank has the same number.
        counts_SR: number of real tokens of each sample (or finer segment) on each rank, int64.
        padded_lengths: tokens of each sample including its padding; None if all padding is after the last sample.
        is_fixed: whether the pack has a fixed size, see `SequenceLayout`.
    """

    def __init__(
        self,
        indices_RT: Tensor,
        counts_SR: Tensor,
        padded_lengths: Optional[tuple[int, ...]],
        device: torch.device,
        *,
        is_fixed: bool = False,
    ) -> None:
        self.size, self._is_fixed = len(indices_RT), is_fixed
        self.indices_RT, self._counts_SR = indices_RT, counts_SR
        self._padded_lengths, self._device = padded_lengths, device
        self._blocks: dict[int, tuple[SequenceLayout, ...]] = {}
        self._orders: dict[tuple[int, int], Optional[tuple[Tensor, Tensor]]] = {}

    def of_rank(self, rank: int) -> Tensor:
        """Return the global indices of one rank's tokens, ascending, int64 on the layout's device."""
        return to_device(self.indices_RT[rank], self._device)

    def blocks(self, ranks_per_block: int = 1) -> tuple[SequenceLayout, ...]:
        if ranks_per_block not in self._blocks:
            count, tokens = self.size // ranks_per_block, self.indices_RT.numel()
            lengths_BS = self._counts_SR.unflatten(1, (count, ranks_per_block)).sum(-1).T.tolist()
            full = self._padded_lengths
            padded = None if full is None else tuple(n // count for n in full)
            self._blocks[ranks_per_block] = tuple(
                SequenceLayout(
                    tuple(lengths), padded or tuple(lengths), tokens // count, self._device, is_fixed=self._is_fixed
                )
                for lengths in lengths_BS
            )
        return self._blocks[ranks_per_block]

    def order(self, block: int, ranks_per_block: int) -> Optional[tuple[Tensor, Tensor]]:
        key = (block, ranks_per_block)
        if key not in self._orders:
            ranks = slice(block * ranks_per_block, (block + 1) * ranks_per_block)
            join = self.indices_RT[ranks].flatten().argsort()
            identity = torch.arange(len(join))
            inverse = torch.empty_like(join).scatter_(0, join, identity)
            orders = (to_device(join, self._device), to_device(inverse, self._device))
            self._orders[key] = None if torch.equal(join, identity) and not self._is_fixed else orders
        return self._orders[key]


class ContextPartition(TokenPartition):
    """The partition of one pack, which gives every rank the same number of tokens of every sample, padding included."""

    def __init__(self, layout: SequenceLayout, size: int, split: ContextSplit) -> None:
        check_split(layout, size, split)
        full = SequenceLayout(layout.lengths, layout.padded_lengths, layout.total_tokens)
        padded_S = torch.tensor(layout.padded_lengths).clamp(min=1)  # the tail pad may belong to an empty sample
        packed = sum(layout.padded_lengths)
        chunks = chunks_per_sample(size, split)
        chunk_T = full.token_index_T * chunks // padded_S[full.segment_ids_T]
        rank_T = torch.minimum(chunk_T, chunks - 1 - chunk_T) if split == "load_balanced" else chunk_T
        if (tail := layout.total_tokens - packed) > 0:
            rank_T[packed:] = torch.arange(tail) * size // tail
        # A stable sort: the tokens of rank 0 in ascending order, then those of rank 1, ...
        indices_RT = rank_T.sort(stable=True).indices.view(size, -1)
        pair_T = full.segment_ids_T * size + rank_T
        counts = torch.bincount(pair_T[full.valid_T], minlength=full.num_samples * size)
        super().__init__(
            indices_RT, counts.view(-1, size), layout.padded_lengths, layout.device, is_fixed=layout.is_fixed
        )


@dataclass(frozen=True)
class FixedPartition:
    """Partition of a pack of fixed size in a CUDA graph; a `Partition`.

    The layouts of blocks and their orders are tables of `layout`. The graph reads tables as inputs, so a replay can use
    other lengths.

    Attributes:
        layout: layout of the local tokens, or of replicated texts and the local tokens.
    """

    layout: SequenceLayout
    size: int
    split: ContextSplit

    def blocks(self, ranks_per_block: int = 1) -> tuple[SequenceLayout, ...]:
        count = self.size // ranks_per_block
        return tuple(self.layout.table(_block, self.size, self.split, ranks_per_block, i) for i in range(count))

    def order(self, block: int, ranks_per_block: int) -> Optional[tuple[Tensor, Tensor]]:
        return self.layout.table(_order, self.size, self.split, ranks_per_block, block)


def _partition(layout: SequenceLayout, size: int, split: ContextSplit) -> ContextPartition:
    return context_partition(layout.image if isinstance(layout, JointLayout) else layout, size, split)


# Copies, because the partition is cached, and a graph overwrites the tables of its packs.
def _block(layout: SequenceLayout, size: int, split: ContextSplit, ranks_per_block: int, i: int) -> SequenceLayout:
    block = _partition(layout, size, split).blocks(ranks_per_block)[i]
    return replace(block.plain, share=(i, size // ranks_per_block))  # tells blocks apart in keys of tables


def _order(
    layout: SequenceLayout, size: int, split: ContextSplit, ranks_per_block: int, i: int
) -> Optional[tuple[Tensor, Tensor]]:
    order = _partition(layout, size, split).order(i, ranks_per_block)
    return None if order is None else (order[0].clone(), order[1].clone())


_context_partition = lru_cache(maxsize=16)(ContextPartition)


def context_partition(layout: SequenceLayout, size: int, split: ContextSplit) -> ContextPartition:
    """Return the partition of the global pack that `layout` belongs to; cached, so that all layers share one object."""
    return _context_partition(layout.plain, size, split)
