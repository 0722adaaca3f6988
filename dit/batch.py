"""The contract between data and training: a pack of samples and the layout that joins them.

Shape suffixes: T packed tokens, S samples in the pack, C latent channels per token, K packed text tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Optional

import torch
from torch import Tensor

from dit.errors import BatchError

DEFAULT_FPS = 30.0
"""Frame rate of samples that name none, images among them (NeMo's convention)."""


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
        held: under context parallelism, the rows of this rank as a pack of their own, in which samples may be empty.
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
        """Rows held here, padding included."""
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
        """Sample of each row held here, int64; the tail pad counts as the last sample."""
        return self._all_segment_ids if self.rows is None else self._all_segment_ids[self.rows]

    @cached_property
    def token_index_T(self) -> Tensor:
        """Position of each row held here inside its own sample, int64."""
        rows = torch.arange(self.total_tokens, device=self.device) if self.rows is None else self.rows
        return rows - self.cu_seqlens_padded.long()[self.segment_ids_T]

    @cached_property
    def valid_T(self) -> Tensor:
        """True for the real tokens among the rows held here."""
        lengths = torch.tensor(self.lengths, device=self.device)
        return self.token_index_T < lengths[self.segment_ids_T]

    def per_token(self, x_S: Tensor) -> Tensor:
        """Give every row held here its sample's entry: `[S]` becomes `[T, 1]`, `[S, D]` becomes `[T, D]`."""
        x_T = x_S[self.segment_ids_T]
        return x_T[:, None] if x_S.dim() == 1 else x_T

    def sum_per_sample(self, x_T: Tensor) -> Tensor:
        """Add the real rows held here up per sample: `[T, ...]` becomes `[S, ...]`."""
        mask = self.valid_T.view(-1, *[1] * (x_T.dim() - 1))
        out = x_T.new_zeros(self.num_samples, *x_T.shape[1:])
        return out.index_add(0, self.segment_ids_T, torch.where(mask, x_T, torch.zeros_like(x_T)))

    @property
    def gathered(self) -> "SequenceLayout":
        """The layout of the rows that attention gets: those of all tensor-parallel ranks under sequence parallelism."""
        return self if self.parent is None else self.parent

    def select(
        self, rows: Tensor, *, gathered: bool = False, held: Optional["SequenceLayout"] = None
    ) -> "SequenceLayout":
        """Describe the same pack on a rank that holds only `rows` (indices into the rows held here).

        Args:
            gathered: the layers gather the rows held here again before attention (sequence parallel).
            held: these rows as a pack of their own, where it is known (context parallel).
        """
        chosen = rows if self.rows is None else self.rows[rows]
        return replace(self, rows=chosen.to(self.device), parent=self.gathered if gathered else None, held=held)

    def to(self, device: torch.device | str) -> "SequenceLayout":
        rows = None if self.rows is None else self.rows.to(device)
        parent = None if self.parent is None else self.parent.to(device)
        held = None if self.held is None else self.held.to(device)
        return replace(self, device=torch.device(device), rows=rows, parent=parent, held=held)


@dataclass
class PackedBatch:
    """One micro-batch: the samples of one pack (a dense batch is a pack of equally long samples).

    Attributes:
        latents_TC: clean latents, patchified, dimensionless after VAE scale and shift.
        positions_T3: (t, h, w) patch index of each token, int64.
        layout: where the samples lie in T.
        sample_ids_S: 63-bit address of each sample, int64; a part of the address of its noise.
        grids: (t, h, w) in patches of each sample, on the host.
        keys: name of each sample, for messages.
        labels_S: class of each sample, int64.
        context_KD: text embeddings of all samples.
        context_layout: where the texts lie in K.
        context_dropped_S: True where the text is replaced by the model's null text; None for nowhere.
        pooled_SD: one more embedding of each text, as a single vector (CLIP's, for FLUX); dropped with the text.
        fps_S: frames per second, float32; None for `DEFAULT_FPS`.
        loss_weight_S: weight of each sample in the loss, float32; None for ones.
        draws_S: number of each sample's draw from the training data, unique in a step, int64; copies of a sample are
            distinguished by it. None for data that are read once, such as held-out ones.
    """

    latents_TC: Tensor
    positions_T3: Tensor
    layout: SequenceLayout
    sample_ids_S: Tensor
    grids: tuple[tuple[int, int, int], ...]
    keys: tuple[str, ...]
    labels_S: Optional[Tensor] = None
    context_KD: Optional[Tensor] = None
    context_layout: Optional[SequenceLayout] = None
    context_dropped_S: Optional[Tensor] = None
    pooled_SD: Optional[Tensor] = None
    fps_S: Optional[Tensor] = None
    loss_weight_S: Optional[Tensor] = None
    draws_S: Optional[Tensor] = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """Move every tensor to `device`."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device, non_blocking=non_blocking)
            elif isinstance(value, SequenceLayout):
                moved[field.name] = value.to(device)
        return replace(self, **moved)

    def validate(self, *, num_classes: Optional[int] = None) -> "PackedBatch":
        """Check the batch against its own layout and the model's classes; return it.

        Raises:
            BatchError: lengths disagree, or a label lies outside `[0, num_classes)`.
        """
        S, T = self.layout.num_samples, self.layout.total_tokens
        sizes = {
            "latents_TC": (len(self.latents_TC), T),
            "positions_T3": (len(self.positions_T3), T),
            "sample_ids_S": (len(self.sample_ids_S), S),
            "grids": (len(self.grids), S),
            "keys": (len(self.keys), S),
        }
        for name in ("labels_S", "pooled_SD", "fps_S", "loss_weight_S", "draws_S"):
            value = getattr(self, name)
            if value is not None:
                sizes[name] = (len(value), S)
        if self.context_layout is not None and self.context_KD is not None:
            sizes["context_KD"] = (len(self.context_KD), self.context_layout.total_tokens)
            sizes["context_layout"] = (self.context_layout.num_samples, S)
        wrong = [f"{k} has {have} rows, needs {need}" for k, (have, need) in sizes.items() if have != need]
        for grid, length, key in zip(self.grids, self.layout.lengths, self.keys):
            if grid[0] * grid[1] * grid[2] != length:
                wrong.append(f"sample {key!r} has grid {grid} but {length} tokens")
        if num_classes is not None and self.labels_S is not None:
            for label, key in zip(self.labels_S.tolist(), self.keys):
                if not 0 <= label < num_classes:
                    wrong.append(
                        f"sample {key!r} has label {label}, the model knows 0..{num_classes - 1} "
                        "(fix the data or raise model.num_classes)"
                    )
        if wrong:
            raise BatchError("; ".join(wrong))
        return self

    def grid(self, patch_temporal: int, patch_spatial: int) -> Tensor:
        """Return the latents unpatchified as one dense `[S, C, t, h, w]` tensor, for convolutional backbones.

        Raises:
            BatchError: the samples differ in shape, or the pack holds padding.
        """
        from dit.patchify import unpatchify

        if len(set(self.grids)) != 1 or self.layout.uniform_length is None:
            raise BatchError(
                "a convolutional backbone needs samples of one shape without padding, "
                f"got grids {sorted(set(self.grids))}; bucket the data by shape"
            )
        tokens = self.latents_TC.view(self.layout.num_samples, -1, self.latents_TC.shape[1])
        return torch.stack([unpatchify(x, self.grids[0], patch_temporal, patch_spatial) for x in tokens])
