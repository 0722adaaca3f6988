"""Noise levels inside samples: a clean first frame, a level for every frame, a masked region, clean references.

Every draw is a function of the sample and of the number of its draw, so it does not depend on ranks, packs and workers.
"""

import math
from dataclasses import dataclass, replace

import torch

from dit.batch import PackedBatch
from dit.layout import CLEAN
from dit.levels import Segment, first_frames_clean, unmasked_clean, with_levels
from dit.patchify import Grid
from energon_data.augment import Visit


@dataclass(frozen=True)
class FrameLevels:
    """Shares of the samples with several noise levels (`dit.levels`); the draws are independent.

    Attributes:
        clean_first_frame: share of the clips whose first frame of tokens is clean.
        own: share of the clips whose frames of tokens have a level each.
        masked: share of the other samples that are generated in a region only: inside a box, or outside it.
    """

    clean_first_frame: float = 0.0
    own: float = 0.0
    masked: float = 0.0

    def __call__(self, batch: PackedBatch) -> PackedBatch:
        """Return a full pack whose clips have the levels that are drawn for them; references are clean.

        Tokens after those of a sample's grid are its references.
        """
        clean = [tokens - math.prod(grid) for tokens, grid in zip(batch.layout.lengths, batch.grids)]
        if not (self.clean_first_frame or self.own or self.masked or any(clean)):
            return batch
        ids: list[int] = batch.sample_ids_S.tolist()
        draws: list[int] = [0] * len(ids) if batch.draws_S is None else batch.draws_S.tolist()
        segments = list(map(self._segments, batch.grids, clean, ids, draws))
        return replace(batch, layout=with_levels(batch.layout, segments))

    def _segments(self, grid: Grid, clean: int, sample: int, draw: int) -> list[Segment]:
        frames = self._of_frames(grid, sample, draw) or self._of_mask(grid, sample, draw)
        return [*(frames or [(math.prod(grid), 0)]), (clean, CLEAN)] if clean else frames

    def _of_frames(self, grid: Grid, sample: int, draw: int) -> list[Segment]:
        frames, tokens = grid[0], grid[1] * grid[2]
        if frames == 1:
            return []
        clean, own = Visit(0, 0, draw, sample).generator("/levels").random(2) < (self.clean_first_frame, self.own)
        if not own:
            return first_frames_clean([grid])[0] if clean else []
        return [(tokens, CLEAN if clean and frame == 0 else frame) for frame in range(frames)]

    def _of_mask(self, grid: Grid, sample: int, draw: int) -> list[Segment]:
        share, inside, height, y, width, x = Visit(0, 0, draw, sample).generator("/mask").random(6)
        if share >= self.masked:
            return []
        (top, bottom), (left, right) = _interval(height, y, grid[1]), _interval(width, x, grid[2])
        mask_THW = torch.zeros(grid, dtype=torch.bool)
        mask_THW[:, top:bottom, left:right] = True
        return unmasked_clean((mask_THW if inside < 0.5 else ~mask_THW).flatten())


def _interval(length: float, place: float, limit: int) -> tuple[int, int]:
    """Return start and end of 1 to `limit` positions; both draws are in [0, 1)."""
    size = 1 + int(length * limit)
    start = int(place * (limit - size + 1))
    return start, start + size
