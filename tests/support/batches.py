"""Packs of images and clips with texts, classes and frame rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.layout import SequenceLayout
from dit.patchify import grid_positions
from dit.sampling.generate import generate_each


def pack_of(
    layout: SequenceLayout,
    latents_TC: Tensor,
    grids: Optional[Sequence[tuple[int, int, int]]] = None,
    **changes: Any,
) -> PackedBatch:
    """Return a pack of samples 0, 1, ... of these grids; None for lines of patches."""
    grids = [(1, 1, n) for n in layout.lengths] if grids is None else grids
    positions = torch.zeros(layout.total_tokens, 3, dtype=torch.int64)
    for start, length, grid in zip(layout.starts, layout.lengths, grids):
        positions[start : start + length] = grid_positions(grid)
    names = {"sample_ids_S": torch.arange(len(grids)), "keys": tuple(map(str, range(len(grids)))), **changes}
    return PackedBatch(latents_TC=latents_TC, positions_T3=positions, layout=layout, grids=tuple(grids), **names)


@dataclass(frozen=True)
class Sample:
    """An image or clip: grid, number of text tokens (None for no text), frame rate, class, or a given text."""

    grid: tuple[int, int, int]
    text_tokens: Optional[int] = None
    fps: float = 30.0
    label: Optional[int] = None
    given: Optional[Tensor] = None

    def text(self, width: int) -> Optional[Tensor]:
        if self.text_tokens is None:
            return self.given
        generator = torch.Generator().manual_seed(sum(self.grid) * 100 + self.text_tokens)
        return torch.randn(self.text_tokens, width, generator=generator)

    def pooled(self, width: int) -> Optional[Tensor]:
        """Return a pooled text vector, which does not depend on the text tokens."""
        if self.text_tokens is None:
            return None
        return torch.randn(width, generator=torch.Generator().manual_seed(sum(self.grid) * 7 + self.text_tokens))


MIXED = [
    Sample((1, 4, 4), 5, label=1),
    Sample((3, 2, 2), None, fps=8.0),
    Sample((1, 2, 3), 1, label=0),
    Sample((2, 3, 4), 9, fps=24.0, label=2),
]


DENSE = [Sample((2, 2, 3), n, fps=12.0, label=n) for n in (2, 4, 1)]


def pooled_size(config: Any) -> Optional[int]:
    """Return the width of the model's pooled text, or None."""
    pooled = config.batch_spec().condition("pooled")
    return None if pooled is None else pooled.shape[0]


def pack(
    samples: list[Sample], config: Any, *, multiple_of: int = 1, tail: int = 0, context_multiple_of: int = 1
) -> PackedBatch:
    """Pack samples as the data side does; a sample without text gets large values, which the model must ignore."""
    lengths = [t * h * w for t, h, w in (sample.grid for sample in samples)]
    layout = SequenceLayout.from_lengths(lengths, multiple_of=multiple_of)
    layout = SequenceLayout.from_lengths(lengths, multiple_of=multiple_of, total_tokens=layout.total_tokens + tail)
    conditions = Conditions(fps=Entry("sample", torch.tensor([sample.fps for sample in samples])))
    if (width := config.context_size) is not None:
        texts = [sample.text(width) for sample in samples]
        dropped = torch.tensor([text is None for text in texts])
        texts = [torch.full((3, width), 1e3) if text is None else text for text in texts]
        context_layout = SequenceLayout.from_lengths([len(text) for text in texts], multiple_of=context_multiple_of)
        context = torch.full((context_layout.total_tokens, width), 1e3)
        for text, start in zip(texts, context_layout.starts):
            context[start : start + len(text)] = text
        conditions |= {"context": Entry("text", context, context_layout, dropped)}
    if condition := config.condition("label"):
        labels = torch.tensor([condition.num_classes if s.label is None else s.label for s in samples])
        conditions |= {"label": Entry("sample", labels)}
    if (size := pooled_size(config)) is not None:
        pooled_texts = [sample.pooled(size) for sample in samples]
        vectors = torch.stack([torch.full((size,), 1e3) if x is None else x for x in pooled_texts])
        conditions |= {"pooled": Entry("sample", vectors, None, dropped)}
    latents_TC = torch.zeros(layout.total_tokens, config.token_channels)
    return pack_of(layout, latents_TC, [sample.grid for sample in samples], conditions=conditions).validate()


def draw(batch: PackedBatch, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Draw inputs and times of a pack."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch.latents_TC.shape
    return torch.randn(shape, generator=generator), torch.rand(batch.layout.num_samples, generator=generator)


STRETCH = [2.0, 3.0, 2.0]


def generate(*arguments: Any, **options: Any) -> Tensor:
    """Generate samples of one shape, see `generate_each`, as latents `[N, C, T, H, W]`."""
    return torch.stack(generate_each(*arguments, **options))
