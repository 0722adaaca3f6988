"""The layout of a packed token axis (THD): which tokens belong to which sample.

Shape suffixes: T packed tokens, S samples in the pack, D any width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Optional

import torch
from torch import Tensor

from dit.errors import BatchError


@dataclass(frozen=True)
class SequenceLayout:
    """Where each sample lies on a packed token axis (THD).

    Sample `i` owns the rows `[starts[i], starts[i] + padded_lengths[i])`, of which the first `lengths[i]` are real.
    Rows behind the last sample up to `total_tokens` are the tail pad. Padding rows belong to no attention segment:
    attention leaves zeros there, and the loss ignores them.

    A rank that holds only some rows (sequence or context parallel) has the same lengths and a different `rows`.
    Under sequence parallelism the layers join the tensor-parallel ranks' rows before attention: `gathered` has these.

    Attributes:
        lengths: real tokens per sample, on the host.
        padded_lengths: tokens per sample including its own padding, on the host.
        total_tokens: rows of the whole pack, all padding included.
        rows: which of those rows this rank holds, in its order, int64; None for all of them.
        parent: the layout these rows were taken from, where the layers gather them again; None where they do not.
        held: under context parallelism, this rank's tokens described as a pack (samples may be empty).
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    total_tokens: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    rows: Optional[Tensor] = None
    parent: Optional["SequenceLayout"] = None
    held: Optional["SequenceLayout"] = None

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        multiple_of: int = 1,
        total_tokens: Optional[int] = None,
        device: torch.device | str = "cpu",
    ) -> "SequenceLayout":
        """Lay samples of the given lengths side by side.

        Args:
            lengths: real tokens per sample.
            multiple_of: pad every sample to a multiple of this many tokens.
            total_tokens: rows of the pack; the sum of the padded lengths if None.

        Raises:
            BatchError: there is no sample, a sample is empty, or the samples do not fit into `total_tokens`.
        """
        if not lengths or min(lengths) < 1:
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
    def num_rows(self) -> int:
        """Local rows, padding included."""
        return self.total_tokens if self.rows is None else len(self.rows)

    @property
    def valid_tokens(self) -> int:
        """Real tokens of the whole pack."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sample, without padding."""
        return max(self.lengths)

    @property
    def uniform_length(self) -> Optional[int]:
        """The common sample length if the whole pack is a dense batch without any padding, else None."""
        n = self.lengths[0]
        return n if len(set(self.lengths)) == 1 and self.total_tokens == n * self.num_samples else None

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each sample, on the host."""
        return tuple(accumulate(self.padded_lengths, initial=0))[:-1]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Cumulative real lengths, int32 `[S + 1]` (the words of Transformer Engine and flash-attn)."""
        return torch.tensor((0, *accumulate(self.lengths)), dtype=torch.int32, device=self.device)

    @cached_property
    def cu_seqlens_padded(self) -> Tensor:
        """Cumulative padded lengths, int32 `[S + 1]`."""
        return torch.tensor((0, *accumulate(self.padded_lengths)), dtype=torch.int32, device=self.device)

    @cached_property
    def _all_segment_ids(self) -> Tensor:
        ids = torch.repeat_interleave(
            torch.arange(self.num_samples), torch.tensor(self.padded_lengths), output_size=sum(self.padded_lengths)
        )
        tail = torch.full((self.total_tokens - len(ids),), self.num_samples - 1)
        return torch.cat([ids, tail]).to(self.device)

    @cached_property
    def segment_ids_T(self) -> Tensor:
        """Sample of each local row, int64; the tail pad counts as the last sample."""
        return self._all_segment_ids if self.rows is None else self._all_segment_ids[self.rows]

    @cached_property
    def token_index_T(self) -> Tensor:
        """Position of each local row inside its own sample, int64."""
        rows = torch.arange(self.total_tokens, device=self.device) if self.rows is None else self.rows
        return rows - self.cu_seqlens_padded.long()[self.segment_ids_T]

    @cached_property
    def valid_T(self) -> Tensor:
        """True for the real tokens among the local rows."""
        lengths = torch.tensor(self.lengths, device=self.device)
        return self.token_index_T < lengths[self.segment_ids_T]

    def per_token(self, x_S: Tensor) -> Tensor:
        """Copy its sample's entry to every local row: `[S]` becomes `[T, 1]`, `[S, D]` becomes `[T, D]`."""
        x_T = x_S[self.segment_ids_T]
        return x_T[:, None] if x_S.dim() == 1 else x_T

    def sum_per_sample(self, x_T: Tensor) -> Tensor:
        """Sum the real local rows per sample: `[T, ...]` becomes `[S, ...]`."""
        mask = self.valid_T.view(-1, *[1] * (x_T.dim() - 1))
        out = x_T.new_zeros(self.num_samples, *x_T.shape[1:])
        return out.index_add(0, self.segment_ids_T, torch.where(mask, x_T, torch.zeros_like(x_T)))

    def spread(self, x_R: Tensor) -> Tensor:
        """Put the samples' rows, side by side without padding, at their places in the whole pack; padding is zero."""
        if self.total_tokens == len(x_R):
            return x_R
        out = x_R.new_zeros(self.total_tokens, *x_R.shape[1:])
        first = 0
        for start, length in zip(self.starts, self.lengths):
            out[start : start + length] = x_R[first : first + length]
            first += length
        return out

    def without_padding(self, x_T: Tensor) -> Tensor:
        """Undo `spread`: return the samples' rows side by side; a pack without padding is not copied."""
        if self.total_tokens == self.valid_tokens:
            return x_T
        return torch.cat([x_T[start : start + length] for start, length in zip(self.starts, self.lengths)])

    def followed_by(self, other: "SequenceLayout") -> "SequenceLayout":
        """Describe another pack laid behind this one: samples and rows of this one, then those of the other.

        The tail pad of each becomes padding of its last sample.
        """
        rows = None
        if self.rows is not None and other.rows is not None:
            rows = torch.cat([self.rows, other.rows + self.total_tokens])
        padded = [
            (*x.padded_lengths[:-1], x.padded_lengths[-1] + x.total_tokens - sum(x.padded_lengths))
            for x in (self, other)
        ]
        return replace(
            self,
            lengths=self.lengths + other.lengths,
            padded_lengths=padded[0] + padded[1],
            total_tokens=self.total_tokens + other.total_tokens,
            rows=rows,
        )

    @property
    def gathered(self) -> "SequenceLayout":
        """The layout of the rows that attention gets: those of all tensor-parallel ranks under sequence parallelism."""
        return self if self.parent is None else self.parent

    def select(
        self, rows: Tensor, *, gathered: bool = False, held: Optional["SequenceLayout"] = None
    ) -> "SequenceLayout":
        """Describe the same pack on a rank whose local rows are `rows` (indices into the present local rows).

        Args:
            gathered: the layers gather the local rows again before attention (sequence parallel).
            held: these rows described as a pack, where it is known (context parallel).
        """
        chosen = rows if self.rows is None else self.rows[rows]
        return replace(self, rows=chosen.to(self.device), parent=self.gathered if gathered else None, held=held)

    def to(self, device: torch.device | str) -> "SequenceLayout":
        rows = None if self.rows is None else self.rows.to(device)
        parent = None if self.parent is None else self.parent.to(device)
        held = None if self.held is None else self.held.to(device)
        return replace(self, device=torch.device(device), rows=rows, parent=parent, held=held)
