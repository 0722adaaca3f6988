"""Which rows of a pack each context-parallel rank holds, and how the rows of several ranks lie as a pack of their own.

Every sample is cut into equal chunks, padding included. `contiguous` gives rank r the r-th of `size` chunks;
`load_balanced` gives it chunks r and 2 * size - 1 - r of `2 * size` (Megatron-Core's and Transformer Engine's order,
made for causal masks). The tail pad is cut into `size` parts. A rank keeps its rows in ascending order, so that of each
sample it holds the real rows first and padding behind: what it holds is again a pack, with shorter samples.
"""

from functools import lru_cache
from typing import Literal, Optional

import torch
from torch import Tensor

from dit.errors import BatchError
from dit.layout import SequenceLayout

ContextSplit = Literal["contiguous", "load_balanced"]


def chunks_per_sample(size: int, split: ContextSplit) -> int:
    """Return into how many chunks every sample is cut."""
    return size if split == "contiguous" else 2 * size


def check_split(layout: SequenceLayout, size: int, split: ContextSplit) -> None:
    """Check that every sample and the tail pad can be cut into equal chunks.

    Raises:
        BatchError: one cannot.
    """
    chunks, tail = chunks_per_sample(size, split), layout.total_tokens - sum(layout.padded_lengths)
    uneven = sorted({n for n in layout.padded_lengths if n % chunks})
    if uneven or tail % size:
        raise BatchError(
            f"context_parallel_size={size} with the {split} split cuts every sample into {chunks} chunks and the tail "
            f"pad into {size}, but samples have {uneven or 'fitting'} padded tokens and the tail {tail}; "
            f"pad samples to a multiple of {chunks} (BatchSpec.multiple_of) and the pack to a multiple of {size}"
        )


class Shares:
    """The rows that each rank holds of a pack in some order, and how the rows of several ranks lie as a pack.

    Args:
        rows_RT: rows of each rank, ascending, all ranks equally many.
        counts_SR: real rows of each sample, or finer segment, on each rank.
        padded_lengths: rows of each sample including its own padding; None where all padding lies behind the last.
        device: of the index tensors.
    """

    def __init__(
        self, rows_RT: Tensor, counts_SR: Tensor, padded_lengths: Optional[tuple[int, ...]], device: torch.device
    ) -> None:
        self.size = len(rows_RT)
        self.rows_RT, self._counts_SR = rows_RT, counts_SR
        self._padded_lengths, self._device = padded_lengths, device
        self._blocks: dict[int, tuple[SequenceLayout, ...]] = {}
        self._orders: dict[tuple[int, int], Optional[tuple[Tensor, Tensor]]] = {}

    def of_rank(self, rank: int) -> Tensor:
        """Return the rows of one rank, ascending, int64 on the layout's device."""
        return self.rows_RT[rank].to(self._device)

    def blocks(self, ranks_per_block: int = 1) -> tuple[SequenceLayout, ...]:
        """Describe the joined rows of each run of adjacent ranks as a pack of their own; samples may be empty in it."""
        if ranks_per_block not in self._blocks:
            count, rows = self.size // ranks_per_block, self.rows_RT.numel()
            lengths_BS = self._counts_SR.unflatten(1, (count, ranks_per_block)).sum(-1).T.tolist()
            whole = self._padded_lengths
            padded = None if whole is None else tuple(n // count for n in whole)
            self._blocks[ranks_per_block] = tuple(
                SequenceLayout(tuple(lengths), padded or tuple(lengths), rows // count, self._device)
                for lengths in lengths_BS
            )
        return self._blocks[ranks_per_block]

    def order(self, block: int, ranks_per_block: int) -> Optional[tuple[Tensor, Tensor]]:
        """Return how rows that lie rank behind rank are put into ascending order, and back, as index tensors.

        None where they already are, as those of one sample under the contiguous split.
        """
        key = (block, ranks_per_block)
        if key not in self._orders:
            ranks = slice(block * ranks_per_block, (block + 1) * ranks_per_block)
            join = self.rows_RT[ranks].flatten().argsort()
            identity = torch.arange(len(join))
            back = torch.empty_like(join).scatter_(0, join, identity)
            self._orders[key] = None if torch.equal(join, identity) else (join.to(self._device), back.to(self._device))
        return self._orders[key]


class ContextRows(Shares):
    """The shares of one pack, of every sample the same number of rows.

    Args:
        layout: the whole pack.
        size: context-parallel ranks.
    """

    def __init__(self, layout: SequenceLayout, size: int, split: ContextSplit) -> None:
        check_split(layout, size, split)
        whole = SequenceLayout(layout.lengths, layout.padded_lengths, layout.total_tokens)
        padded_S = torch.tensor(layout.padded_lengths)
        packed = sum(layout.padded_lengths)
        chunks = chunks_per_sample(size, split)
        chunk_T = whole.token_index_T * chunks // padded_S[whole.segment_ids_T]
        rank_T = torch.minimum(chunk_T, chunks - 1 - chunk_T) if split == "load_balanced" else chunk_T
        if (tail := layout.total_tokens - packed) > 0:
            rank_T[packed:] = torch.arange(tail) * size // tail
        # Stable: the rows of rank 0 in ascending order, then those of rank 1, ...
        rows_RT = rank_T.sort(stable=True).indices.view(size, -1)
        address = whole.segment_ids_T * size + rank_T
        counts = torch.bincount(address[whole.valid_T], minlength=whole.num_samples * size)
        super().__init__(rows_RT, counts.view(-1, size), layout.padded_lengths, layout.device)


@lru_cache(maxsize=16)
def _context_rows(
    lengths: tuple[int, ...],
    padded_lengths: tuple[int, ...],
    total_tokens: int,
    device: torch.device,
    size: int,
    split: ContextSplit,
) -> ContextRows:
    return ContextRows(SequenceLayout(lengths, padded_lengths, total_tokens, device), size, split)


def context_rows(layout: SequenceLayout, size: int, split: ContextSplit) -> ContextRows:
    """Return the shares of the whole pack that `layout` is a part of; every layer of a step gets the same object.

    Raises:
        BatchError: the pack cannot be cut into equal parts.
    """
    return _context_rows(layout.lengths, layout.padded_lengths, layout.total_tokens, layout.device, size, split)
