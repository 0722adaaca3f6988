"""Noise levels inside samples: a clean first frame, a level for every frame, a clean reference.

Every draw is a function of the sample and of the number of its draw, so it does not depend on ranks, packs and workers.
"""

import math
from dataclasses import dataclass, replace

from dit.batch import PackedBatch
from dit.layout import CLEAN
from dit.levels import Segment, first_frames_clean, with_levels
from dit.patchify import Grid
from energon_data.augment import Visit


@dataclass(frozen=True)
class FrameLevels:
    """Shares of the clips with several noise levels (`dit.levels`); both draws are independent.

    Attributes:
        clean_first_frame: share whose first frame of tokens is clean.
        own: share whose frames of tokens have a level each.
    """

    clean_first_frame: float = 0.0
    own: float = 0.0

    def __call__(self, batch: PackedBatch) -> PackedBatch:
        """Return a full pack whose clips have the levels that are drawn for them; references are clean.

        Tokens after those of a sample's grid are a reference.
        """
        references = [tokens - math.prod(grid) for tokens, grid in zip(batch.layout.lengths, batch.grids)]
        if not (self.clean_first_frame or self.own or any(references)):
            return batch
        ids: list[int] = batch.sample_ids_S.tolist()
        draws: list[int] = [0] * len(ids) if batch.draws_S is None else batch.draws_S.tolist()
        segments = list(map(self._segments, batch.grids, references, ids, draws))
        return replace(batch, layout=with_levels(batch.layout, segments))

    def _segments(self, grid: Grid, reference: int, sample: int, draw: int) -> list[Segment]:
        frames = self._of_frames(grid, sample, draw)
        return [*(frames or [(math.prod(grid), 0)]), (reference, CLEAN)] if reference else frames

    def _of_frames(self, grid: Grid, sample: int, draw: int) -> list[Segment]:
        frames, tokens = grid[0], grid[1] * grid[2]
        if frames == 1:
            return []
        clean, own = Visit(0, 0, draw, sample).generator("/levels").random(2) < (self.clean_first_frame, self.own)
        if not own:
            return first_frames_clean([grid])[0] if clean else []
        return [(tokens, CLEAN if clean and frame == 0 else frame) for frame in range(frames)]
