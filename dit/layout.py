"""The layout of a packed token axis (THD): which tokens belong to which sample.

A token is real or padding: `valid_T` is True for real tokens, `valid_tokens` is their number, and `real_tokens` has
their indices. T counts tokens; frames are `T` only in the shape `[C, T, H, W]` of a latent, and `t` in a grid
`(t, h, w)`.

Shape suffixes: T local tokens of the pack, S samples in the pack, R real tokens of the pack, D any width.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Concatenate, Literal, Optional, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dit.errors import BatchError

CLEAN = -1
"""Number of the level of clean tokens: t = 0 and no loss."""
LONG = 128
"""From this average sample length, `sum_tokens` makes one vectorised sum per sample; below it, one call for all."""


TABLES = {
    *("lengths_S", "cu_seqlens", "cu_seqlens_padded", "segment_ids_T", "token_index_T", "valid_T"),
    *("real_tokens", "tokens_by_sample"),
}
"""Properties of a layout that are computed once and are tensors."""
MOST_TABLES = 64
"""Limit of the tables of a layout that many packs share; a layout of fixed size keeps all, for CUDA graphs."""
ITSELF = "itself"
"""Stands for the layout among the arguments of its tables."""
Table = TypeVar("Table")
Others = ParamSpec("Others")
UNPINNED = ("cpu", "meta")
"""Devices to which copies need no page-locked memory."""


def to_device(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to `device`; the host does not wait.

    A copy from ordinary memory to a GPU waits for all earlier work of the device. A copy from page-locked memory is
    queued after it.
    """
    if values.device.type == "cpu" and torch.device(device).type not in UNPINNED:
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def _identities(others: tuple[object, ...]) -> list[object]:
    return [id(x) if isinstance(x, SequenceLayout) else x for x in others]


def _of_shard(
    layout: "SequenceLayout",
    share: tuple[int, int],
    make: Callable[Concatenate["SequenceLayout", Others], Table],
    /,
    *others: Others.args,
    **named: Others.kwargs,
) -> Table:
    """Return a table of a shard; the gathered layout stores it, see `SequenceLayout.table`."""
    return make(layout.shard(*share), *others, **named)


# Not frozen, because torch 2.11 compiles again for other lengths of tuples in a frozen dataclass.
@dataclass(unsafe_hash=True)
class SequenceLayout:
    """The samples on a packed token axis (THD).

    Sample `i` has the tokens `[starts[i], starts[i] + padded_lengths[i])`. The first `lengths[i]` of them are real, the
    others are its padding. Tokens after the last sample, up to `total_tokens`, are the tail pad. In `segment_ids_T`, a
    padding token has the number of its sample, and the tail pad that of the last sample. But attention writes zeros to
    padding (`cu_seqlens` excludes it), and the loss ignores it. Samples a, b of 3 and 6 tokens, each
    padded to a multiple of 4, in a pack of 14 tokens (`.` is padding):

        index             0  1  2  3  4  5  6  7  8  9  10 11 12 13
        token             a0 a1 a2 .  b0 b1 b2 b3 b4 b5 .  .  .  .
                          '-- a ---'  '--------- b ---------' '-tail

        lengths (3, 6)    padded_lengths (4, 8)    total_tokens 14    starts (0, 4)
        cu_seqlens [0, 3, 9]    cu_seqlens_padded [0, 4, 12]    segment_ids_T [0 0 0 0 1 1 1 1 1 1 1 1 1 1]

    Under context or sequence parallelism a rank has only some of these tokens. Its layout has the same lengths, and
    `local_indices` lists the local tokens. Rank 1 of 2 under context parallelism (contiguous split):

        local_indices [2, 3, 8, 9, 10, 11, 13]
        local tokens   a2 .  b4 b5 .   .   .
        local          lengths (1, 2), padded_lengths (2, 4), total_tokens 7

    Under sequence parallelism the layers gather the tokens of all tensor-parallel ranks before attention. The layout of
    the gathered tokens is `gathered`. It also stores the tables of its shards, because a pass makes new shards.

    Attributes:
        lengths: real tokens of each sample, on the host.
        padded_lengths: tokens of each sample including its own padding, on the host.
        total_tokens: tokens of the global pack, all padding included.
        device: device of the tensors that are computed from the layout.
        local_indices: global indices of the local tokens, in their local order, int64 `[T]`; None for all tokens.
        parent: under sequence parallelism, the layout of the tokens that the layers gather before attention; else None.
        share: index of this shard of `parent`, or of this block of a `FixedPartition`, and number of shards or blocks.
        local: under context parallelism, the layout of the local tokens as a separate pack (samples may be empty).
        levels: noise levels inside the samples; None if each sample has one level.
        is_fixed: whether all packs of the run have these numbers of samples and tokens, and a CUDA graph may repeat the
            pack with other lengths (`dit.fixed_packs`). Operations then depend on the tables, not on the lengths.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    total_tokens: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    local_indices: Optional[Tensor] = None
    parent: Optional["SequenceLayout"] = None
    share: tuple[int, int] = (0, 1)
    local: Optional["SequenceLayout"] = None
    levels: Optional["Levels"] = None
    is_fixed: bool = False

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        multiple_of: int = 1,
        total_tokens: Optional[int] = None,
        device: torch.device | str = "cpu",
        may_be_empty: bool = False,
    ) -> "SequenceLayout":
        """Return the layout of samples of the given lengths, packed one after the other.

        Args:
            multiple_of: every sample is padded to a multiple of this number of tokens.
            total_tokens: tokens of the pack. Default: the sum of the padded lengths.
            may_be_empty: for optional texts.
        """
        if not lengths or min(lengths) < (0 if may_be_empty else 1):
            raise BatchError(f"a pack needs samples of at least one token, got lengths {list(lengths)}")
        padded = tuple(-(-n // multiple_of) * multiple_of for n in lengths)
        total = sum(padded) if total_tokens is None else total_tokens
        if sum(padded) > total:
            raise BatchError(
                f"{len(padded)} samples need {sum(padded)} tokens (each padded to a multiple of {multiple_of}) "
                f"but the pack has {total}; raise the pack length or pack fewer samples"
            )
        return cls(tuple(int(n) for n in lengths), padded, int(total), torch.device(device))

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def level_layout(self) -> "SequenceLayout":
        """Layout of the segments with one noise level each: the samples, unless they have several levels."""
        return self if self.levels is None else self.levels.layout

    @property
    def num_local_tokens(self) -> int:
        """Number of local tokens, padding included."""
        return self.total_tokens if self.local_indices is None else len(self.local_indices)

    @property
    def valid_tokens(self) -> int:
        """Real tokens of the global pack."""
        return sum(self.lengths)

    @property
    def has_padding(self) -> bool:
        """Whether the global pack has padding, or may have it."""
        return self.is_fixed or self.valid_tokens < self.total_tokens

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sample, without padding, or a bound."""
        return self.total_tokens if self.is_fixed else max(self.lengths)

    @property
    def uniform_length(self) -> Optional[int]:
        """The common length if the global pack is a dense batch (equal lengths, no padding), else None."""
        if self.is_fixed:
            return None
        n = self.lengths[0]
        return n if len(set(self.lengths)) == 1 and self.total_tokens == n * self.num_samples else None

    @cached_property
    def kind(self) -> Literal["one sample", "dense", "ragged"]:
        """Whether the local tokens are one sample, a dense batch of samples, or anything else.

        Compiled layers read this instead of lengths, so that packs of any lengths use the same graphs.
        """
        if self.num_samples == 1:
            return "one sample"
        return "dense" if self.local_indices is None and self.uniform_length else "ragged"

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index of the first token of each sample, on the host."""
        return tuple(accumulate(self.padded_lengths, initial=0))[:-1]

    @cached_property
    def lengths_S(self) -> Tensor:
        """Real tokens of each sample, int64."""
        return self.tensor(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Cumulative real lengths, int32 `[S + 1]` (as in Transformer Engine and flash-attn)."""
        return self.tensor((0, *accumulate(self.lengths)), torch.int32)

    @cached_property
    def cu_seqlens_padded(self) -> Tensor:
        """Cumulative padded lengths, int32 `[S + 1]`."""
        return self.tensor((0, *accumulate(self.padded_lengths)), torch.int32)

    @cached_property
    def _all_segment_ids(self) -> Tensor:
        ids = torch.repeat_interleave(
            torch.arange(self.num_samples), torch.tensor(self.padded_lengths), output_size=sum(self.padded_lengths)
        )
        tail = torch.full((self.total_tokens - len(ids),), self.num_samples - 1)
        return to_device(torch.cat([ids, tail]), self.device)

    @cached_property
    def segment_ids_T(self) -> Tensor:
        """Sample of each local token, int64; padding has the number of its sample, the tail pad that of the last."""
        if self.parent is not None:
            return self.parent.segment_ids_T.chunk(self.share[1])[self.share[0]]
        return self._all_segment_ids if self.local_indices is None else self._all_segment_ids[self.local_indices]

    @cached_property
    def segment_runs(self) -> tuple[tuple[int, int, int], ...]:
        """Contiguous runs of local tokens of one sample: (sample, first token, number of tokens), on the host.

        The tail pad belongs to the last sample. The device is synchronised only if `local_indices` is an arbitrary
        selection (neither `parent` nor `local` is set).
        """
        if self.parent is not None:
            first = self.share[0] * self.num_local_tokens
            end = first + self.num_local_tokens
            cut = ((i, max(start, first), min(start + n, end)) for i, start, n in self.parent.segment_runs)
            return tuple((i, start - first, stop - start) for i, start, stop in cut if start < stop)
        if self.local_indices is None or self.local is not None:
            pack = self if self.local_indices is None else self.local
            assert pack is not None
            ends = (*pack.starts[1:], pack.total_tokens)
            return tuple((i, a, b - a) for i, (a, b) in enumerate(zip(pack.starts, ends)) if a < b)
        ids, counts = torch.unique_consecutive(self.segment_ids_T, return_counts=True)
        starts = counts.cumsum(0) - counts
        return tuple(zip(ids.tolist(), starts.tolist(), counts.tolist()))

    @cached_property
    def real_tokens(self) -> Tensor:
        """Indices of the real tokens in the global pack, int64 `[R]`."""
        shifts = torch.tensor([start - first for start, first in zip(self.starts, accumulate(self.lengths, initial=0))])
        shift_R = torch.repeat_interleave(shifts, torch.tensor(self.lengths), output_size=self.valid_tokens)
        return to_device(torch.arange(self.valid_tokens) + shift_R, self.device)

    @cached_property
    def tables(self) -> dict[tuple[object, ...], tuple[tuple[object, ...], object]]:
        """Results of `table`, with the other arguments of each."""
        return {}

    def table(
        self, make: Callable[Concatenate["SequenceLayout", Others], Table], *others: Others.args, **named: Others.kwargs
    ) -> Table:
        """Return `make(self, *others)`. It is stored, so all layers share it; `parent` stores the tables of a shard.

        Args:
            make: module-level function that computes tensors or a layout from lengths.
            others: layouts of the same samples, or hashable values that are the same for all packs.
        """
        assert not named, "named arguments are not part of the key"
        if self.parent is not None:
            return self.parent.table(_of_shard, self.share, make, *others, **named)
        # A marker in place of this layout: a reference cycle would keep its tables until garbage collection.
        stored = tuple([ITSELF if x is self else x for x in others])  # lists take less time than generators
        key: tuple[object, ...] = make, *[x.sizes if isinstance(x, SequenceLayout) else x for x in others]
        # Keys of packs of fixed size have no lengths, so layouts of the same size are told apart by a further word.
        while self.is_fixed and key in self.tables and _identities(self.tables[key][0]) != _identities(stored):
            key = (*key, "another")
        if key not in self.tables:
            if len(self.tables) == MOST_TABLES and not self.is_fixed:
                del self.tables[next(iter(self.tables))]
            self.tables[key] = stored, make(self, *others, **named)
        return cast("Table", self.tables[key][1])

    @property
    def plain(self) -> "SequenceLayout":
        """Layout of the same global pack without tables, for keys of caches that live longer than a pack."""
        return SequenceLayout(self.lengths, self.padded_lengths, self.total_tokens, self.device, is_fixed=self.is_fixed)

    @property
    def sizes(self) -> tuple[Hashable, ...]:
        """All lengths that do not change, whether these are local tokens, and the index of a shard or block."""
        lengths = self.num_samples if self.is_fixed else (self.lengths, self.padded_lengths)
        return lengths, self.total_tokens, self.local_indices is None, self.share

    @cached_property
    def token_index_T(self) -> Tensor:
        """Index of each local token within its sample, int64."""
        indices = self.local_indices
        indices_T = torch.arange(self.total_tokens, device=self.device) if indices is None else indices
        return indices_T - self.gathered.cu_seqlens_padded.long()[self.segment_ids_T]

    @cached_property
    def valid_T(self) -> Tensor:
        """True for the real tokens among the local ones."""
        return self.token_index_T < self.gathered.lengths_S[self.segment_ids_T]

    @cached_property
    def noised_T(self) -> Tensor:
        """True for the real local tokens that are not clean, which are those that count in the loss."""
        if self.levels is None:
            return self.valid_T
        return self.valid_T & ~self.levels.clean_L[self.levels.layout.segment_ids_T]

    @cached_property
    def tokens_by_sample(self) -> tuple[Tensor, Tensor]:
        """Local token indices sorted by sample, and the offset of each sample in them: int64 `[T]` and `[S]`."""
        if self.local_indices is None:
            return torch.arange(self.total_tokens, device=self.device), self.cu_seqlens_padded[:-1].long()
        sorted_T, order_T = self.segment_ids_T.sort(stable=True)
        return order_T, torch.searchsorted(sorted_T, torch.arange(self.num_samples, device=self.device))

    def per_token(self, x_S: Tensor) -> Tensor:
        """Copy the value of each sample to its local tokens: `[S]` becomes `[T, 1]`, `[S, D]` becomes `[T, D]`."""
        x_S = x_S[:, None] if x_S.dim() == 1 else x_S
        if not (x_S.requires_grad and torch.is_grad_enabled()):
            return x_S.index_select(0, self.segment_ids_T)
        x_T: Tensor = _PerToken.apply(x_S, self)
        return x_T

    def per_level(self, x_S: Tensor) -> Tensor:
        """Copy the value of each sample to its noise levels: `[S, ...]` becomes `[L, ...]`."""
        if self.levels is None:
            return x_S
        x_L = self.levels.by_sample.per_token(x_S)
        return x_L[:, 0] if x_S.dim() == 1 else x_L

    def sum_levels(self, x_L: Tensor) -> Tensor:
        """Sum over the noise levels of each sample: `[L]` becomes `[S]`."""
        return x_L if self.levels is None else self.levels.by_sample.sum_tokens(x_L[:, None])[:, 0]

    def sum_tokens(self, x_TD: Tensor) -> Tensor:
        """Sum over the local tokens of each sample, padding included: `[T, ...]` becomes `[S, ...]`, in a fixed order.

        This is the gradient of `per_token`. The gradient of plain indexing adds row by row, which takes four times as
        long on CPU, and on CUDA it sorts all tokens in every layer.
        """
        # Lengths are not part of a graph.
        splits = self.local_indices is None and not self.is_fixed and not torch.compiler.is_compiling()
        if splits and self.total_tokens >= LONG * self.num_samples:  # few long samples
            ends = (*self.starts[1:], self.total_tokens)
            counts = [end - start for start, end in zip(self.starts, ends)]
            return torch.stack([sample_TD.sum(0) for sample_TD in x_TD.split(counts)])
        order_T, starts_S = self.tokens_by_sample
        sums_SD = torch.embedding_bag(x_TD.flatten(1).contiguous(), order_T, starts_S)[0]
        return sums_SD if x_TD.dim() == 2 else sums_SD.view(-1, *x_TD.shape[1:])

    def sum_per_sample(self, x_T: Tensor) -> Tensor:
        """Sum over the real local tokens of each sample: `[T, ...]` becomes `[S, ...]`."""
        mask = self.valid_T.view(-1, *[1] * (x_T.dim() - 1))
        out = x_T.new_zeros(self.num_samples, *x_T.shape[1:])
        return out.index_add(0, self.segment_ids_T, torch.where(mask, x_T, torch.zeros_like(x_T)))

    def insert_padding(self, x_R: Tensor) -> Tensor:
        """Insert zeros for all padding: real tokens `[R, ...]` become the global pack `[total_tokens, ...]`."""
        if self.total_tokens == len(x_R):
            return x_R
        out = x_R.new_zeros(self.total_tokens, *x_R.shape[1:])
        if self.lengths == self.padded_lengths:
            out[: len(x_R)] = x_R
            return out
        return out.index_copy_(0, self.real_tokens, x_R)

    def without_padding(self, x_T: Tensor) -> Tensor:
        """Return the real tokens of the global pack, the inverse of `insert_padding`; no copy without padding."""
        if self.total_tokens == self.valid_tokens:
            return x_T
        if self.lengths == self.padded_lengths:
            return x_T[: self.valid_tokens]
        return x_T.index_select(0, self.real_tokens)

    def followed_by(self, other: "SequenceLayout") -> "SequenceLayout":
        """Return the layout of two full packs concatenated: the samples and tokens of this one, then of the other.

        The tail pad of each becomes padding of its last sample.
        """
        assert all(x.local_indices is None and not x.is_fixed for x in (self, other)), "shards and fixed packs"
        assert (self.levels is None) == (other.levels is None), "either both packs or none have noise levels"
        levels = self.levels and other.levels and self.levels.followed_by(other.levels)
        before, after = (
            (*x.padded_lengths[:-1], x.padded_lengths[-1] + x.total_tokens - sum(x.padded_lengths))
            for x in (self, other)
        )
        lengths, total = self.lengths + other.lengths, self.total_tokens + other.total_tokens
        return SequenceLayout(lengths, before + after, total, self.device, levels=levels)

    @property
    def gathered(self) -> "SequenceLayout":
        """Layout of the tokens in attention; under sequence parallelism, the tokens of all tensor-parallel ranks."""
        return self if self.parent is None else self.parent

    def shard(self, rank: int, size: int) -> "SequenceLayout":
        """Return the layout of one of `size` consecutive, equal parts of the local tokens (sequence parallelism)."""
        indices = self.local_indices
        assert self.num_local_tokens % size == 0, f"{self.num_local_tokens} tokens have no {size} equal parts"
        part_T = (torch.arange(self.total_tokens, device=self.device) if indices is None else indices).chunk(size)[rank]
        levels = None if self.levels is None else replace(self.levels, layout=self.levels.layout.shard(rank, size))
        return replace(self, local_indices=part_T, parent=self, share=(rank, size), local=None, levels=levels)

    def select(self, indices_T: Tensor, *, local: Optional["SequenceLayout"] = None) -> "SequenceLayout":
        """Return the layout of the local tokens at int64 positions; `local` is their layout as a separate pack."""
        selected = indices_T if self.local_indices is None else self.local_indices[indices_T]
        levels = None if self.levels is None else self.levels.select(indices_T)
        selected = to_device(selected, self.device)
        return replace(self, local_indices=selected, parent=None, share=(0, 1), local=local, levels=levels)

    def tensor(
        self, values: Sequence[float] | Sequence[Sequence[float]], dtype: Optional[torch.dtype] = None
    ) -> Tensor:
        """Return numbers as a tensor on the device of the layout; the host does not wait."""
        return to_device(torch.tensor(values, dtype=dtype), self.device)


@dataclass(unsafe_hash=True)
class Levels:
    """The noise levels of a pack whose samples have several, see `dit.levels`.

    Attributes:
        layout: layout of the segments, in the place of samples.
        counts: number of segments of each sample, on the host.
        numbers: level of each segment, on the host: `CLEAN`, 0 for the level of the sample, n > 0 for the n-th of its
            other levels. Segments of a sample with equal numbers have the same level.
    """

    layout: SequenceLayout
    counts: tuple[int, ...]
    numbers: tuple[int, ...]

    @cached_property
    def by_sample(self) -> SequenceLayout:
        """Layout of the segments as tokens of their samples."""
        return SequenceLayout.from_lengths(self.counts, device=self.layout.device)

    @cached_property
    def numbers_L(self) -> Tensor:
        """Number of the level of each segment, int64."""
        return self.layout.tensor(self.numbers)

    @cached_property
    def clean_L(self) -> Tensor:
        """True for clean segments."""
        return self.numbers_L == CLEAN

    def followed_by(self, other: "Levels") -> "Levels":
        """Return the levels of two packs concatenated."""
        layout = self.layout.followed_by(other.layout)
        return Levels(layout, self.counts + other.counts, self.numbers + other.numbers)

    def select(self, indices_T: Tensor) -> "Levels":
        """Return the levels of some of the local tokens."""
        local = None if self.layout.local_indices is not None else _local(self.layout, indices_T)
        return replace(self, layout=self.layout.select(indices_T, local=local))


def _local(layout: SequenceLayout, indices_T: Tensor) -> SequenceLayout:
    """Return the layout of some tokens of the global pack as a separate pack; segments may be empty."""
    full = SequenceLayout(layout.lengths, layout.padded_lengths, layout.total_tokens)
    indices_T = indices_T.cpu()
    ids_T = full.segment_ids_T[indices_T]
    lengths, padded = (
        tuple(torch.bincount(ids, minlength=full.num_samples).tolist())
        for ids in (ids_T[full.valid_T[indices_T]], ids_T)
    )
    return SequenceLayout(lengths, padded, len(indices_T), layout.device)


class _OfLayout(FunctionCtx):
    layout: SequenceLayout


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OfLayout, x_SD: Tensor, layout: SequenceLayout) -> Tensor:
        ctx.layout = layout
        return x_SD.index_select(0, layout.segment_ids_T)

    @staticmethod
    def backward(ctx: _OfLayout, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.sum_tokens(grads[0]), None
