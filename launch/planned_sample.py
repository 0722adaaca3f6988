"""The sample that a run is planned for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Optional

from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.parallel.dims import ParallelDims
from dit.patchify import Grid
from dit.tracing.packs import PackShape
from energon_data.dataset import EnergonData
from energon_data.mock import MockData

DEFAULT_TOKENS = 256
DEFAULT_TEXT_TOKENS = 512
LARGEST_PICTURE = 64 * 64
"""Largest number of tokens of unknown shape that is assumed to be one picture; more tokens are a clip."""


@dataclass(frozen=True)
class Sample:
    """The sample that a run is planned for.

    Attributes:
        pack: tokens of a micro-batch that is a pack of such samples; None for micro-batches of `micro_batch_size`.
        assumed: property that is unknown and assumed: "" for none, "shape" for the grid, "size" for the number of
            tokens.
    """

    grid: Grid
    text_tokens: Optional[int] = None
    pack: Optional[int] = None
    assumed: Literal["", "shape", "size"] = ""

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def as_pack(self) -> tuple[SequenceLayout, list[Grid], Optional[SequenceLayout]]:
        """A pack of this sample: layout, grids, and layout of the texts."""
        texts = None if self.text_tokens is None else SequenceLayout.from_lengths([self.text_tokens])
        return SequenceLayout.from_lengths([self.tokens]), [self.grid], texts

    def count(self, micro_batch_size: int) -> int:
        return micro_batch_size * max(1, (self.pack or 0) // self.tokens)

    def shape(self, dims: ParallelDims) -> PackShape:
        count = self.count(dims.micro_batch_size)
        texts = () if self.text_tokens is None else (self.text_tokens,) * count
        shape = PackShape((self.grid,) * count, texts, dims.token_multiple)
        if self.pack is None:
            return shape
        total = -(-self.pack // dims.token_multiple) * dims.token_multiple
        return replace(shape, total_tokens=max(total, shape.layout().total_tokens))


def assumed_grid(tokens: int) -> Grid:
    """Return a grid for a number of tokens, as square as possible, with as few frames as possible."""
    frames = next(t for t in range(1, tokens + 1) if tokens % t == 0 and tokens // t <= LARGEST_PICTURE)
    area = tokens // frames
    height = max(side for side in range(1, math.isqrt(area) + 1) if area % side == 0)
    return frames, height, area // height


def planned_sample(
    data: object, model: ModelConfig, tokens: Optional[Sequence[int]] = None, text_tokens: Optional[int] = None
) -> Sample:
    """Return the sample of the data settings: the largest synthetic or stored one, a crop, or one of most tokens."""
    pack = getattr(data, "max_tokens_per_pack", None)
    limit = getattr(data, "max_tokens_per_sample", None) or pack
    if model.condition("context") is None:
        text_tokens = None
    elif text_tokens is None:
        setting = data.text_tokens if isinstance(data, MockData) else getattr(data, "max_text_tokens", None)
        text_tokens = setting or DEFAULT_TEXT_TOKENS
    assumed: Literal["", "shape", "size"] = ""
    if tokens is None and isinstance(data, MockData):
        patch_t, patch_s = model.patch_temporal, model.patch_spatial
        tokens = max(((t // patch_t, h // patch_s, w // patch_s) for t, h, w in data.sizes()), key=math.prod)
    elif tokens is None and isinstance(data, EnergonData):
        grids = data.largest_sample(model.patch_temporal, model.patch_spatial)
        total = sum(map(math.prod, grids))
        if 0 < total <= (limit or total):
            tokens = grids[0] if len(grids) == 1 else (total,)
    if tokens is None:
        tokens, assumed = (limit or DEFAULT_TOKENS,), "shape" if limit else "size"
    if len(tokens) == 3:
        return Sample((tokens[0], tokens[1], tokens[2]), text_tokens, pack)
    return Sample(assumed_grid(tokens[0]), text_tokens, pack, assumed or "shape")
