"""Pads all packs of a run to the same numbers of tokens, samples and text tokens, so that one CUDA graph serves them.

Empty samples and padding tokens complete a pack. Here, a pack has four samples and eight tokens (`.` is padding):

    pack     a0 a1 a2 b0 b1              lengths (3, 2)          total_tokens 5
    padded   a0 a1 a2 b0 b1 . . .        lengths (3, 2, 0, 0)    total_tokens 8

Empty samples and padding contribute nothing to loss, gradients and counts. Kernels read lengths from tensors of the
layout (its tables, such as `cu_seqlens`), which are inputs of the graph. A graph is captured from packs without lengths
(`without_lengths`), so a network that reads lengths on the host raises an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.errors import BatchError
from dit.layout import SequenceLayout
from dit.pack_copy import all_layouts, move


@dataclass(frozen=True)
class PackMaxima:
    """Size to which every pack of a run is padded.

    Attributes:
        tokens: latent tokens, padding included.
        samples: samples, empty ones included.
        text_tokens: tokens of each text condition; None to leave texts as they are.
    """

    tokens: int
    samples: int
    text_tokens: Optional[int] = None

    def pad(self, batch: PackedBatch) -> PackedBatch:
        """Return the pack, padded to this size."""
        layout, S = self._padded(batch.layout, self.tokens, "tokens"), self.samples

        def rows(x_S: Optional[Tensor]) -> Optional[Tensor]:
            return None if x_S is None else with_rows(x_S, S)

        missing = S - batch.layout.num_samples
        grids = (*batch.grids, *[(0, 0, 0)] * missing)
        return replace(
            batch,
            latents_TC=with_rows(batch.latents_TC, self.tokens),
            positions_T3=with_rows(batch.positions_T3, self.tokens),
            layout=layout,
            sample_ids_S=with_rows(batch.sample_ids_S, S),
            grids=grids,
            grids_S3=torch.tensor(grids),
            keys=(*batch.keys, *["padding"] * missing),
            conditions=Conditions({name: self._entry(entry) for name, entry in batch.conditions.items()}),
            loss_weight_S=rows(batch.loss_weight_S),
            draws_S=rows(batch.draws_S),
            draw_keys_S=rows(batch.draw_keys_S),
        )

    def _entry(self, entry: Entry) -> Entry:
        if entry.axis == "sample":  # empty samples repeat the last value, because a frame rate of 0 gives NaN
            rows_S = torch.arange(self.samples).clamp(max=len(entry.values) - 1)
            return replace(entry, values=entry.values[rows_S])
        if entry.layout is None:
            return replace(entry, values=with_rows(entry.values, self.tokens))
        tokens = entry.layout.total_tokens if self.text_tokens is None else self.text_tokens
        layout = self._padded(entry.layout, tokens, "text tokens")
        return replace(entry, values=with_rows(entry.values, tokens), layout=layout)

    def _padded(self, layout: SequenceLayout, tokens: int, noun: str) -> SequenceLayout:
        if layout.num_samples > self.samples or layout.total_tokens > tokens:
            cure = "raise data.max_text_tokens, use shorter packs" if noun == "text tokens" else "use shorter packs"
            raise BatchError(
                f"training.cuda_graph=True: a pack has {layout.num_samples} samples and {layout.total_tokens} {noun}, "
                f"and packs are padded to {self.samples} samples and {tokens} {noun}; {cure} or "
                "training.cuda_graph=False"
            )
        empty = (0,) * (self.samples - layout.num_samples)
        lengths, padded = layout.lengths + empty, layout.padded_lengths + empty
        return SequenceLayout(lengths, padded, tokens, layout.device, is_fixed=True)


def with_rows(x: Tensor, rows: int) -> Tensor:
    """Append zeros to a tensor up to a number of rows."""
    return pad(x, [0, 0] * (x.dim() - 1) + [0, rows - len(x)])


class HiddenLengths(tuple[Any, ...]):
    """Lengths or grids whose count may be read, but not the elements, which differ between replays of a graph."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __getitem__(self, key: Any) -> Any:
        self._refuse()

    def __hash__(self) -> int:  # a cache would return the result of the first pack
        self._refuse()

    def __eq__(self, other: object) -> bool:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise BatchError(
            "training.cuda_graph=True: the model reads the lengths of samples on the host, so a graph would repeat "
            "those of one pack; use data of one shape, or training.cuda_graph=False"
        )


def without_lengths(packs: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Return packs of fixed size that share all tensors, but raise an error if a length or grid is read."""
    hidden = move(list(packs), packs[0].latents_TC.device)
    for pack in hidden:
        pack.grids = HiddenLengths(pack.grids)
        # Layouts, and those in their fields: the text and images of a joint layout.
        values = [x for layout in all_layouts(pack).values() for x in (layout, *vars(layout).values())]
        # Each once: the second time, its hidden lengths would be read.
        for layout in {id(x): x for x in values if isinstance(x, SequenceLayout)}.values():
            layout.lengths = layout.padded_lengths = HiddenLengths(layout.lengths)
    return hidden
