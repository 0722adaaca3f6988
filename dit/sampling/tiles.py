"""Sampling of pictures larger than the training pictures: overlapping tiles, averaged in every network call.

The solver's state and its noise are one picture. In each call the network predicts every tile separately, and the
predictions are averaged where tiles overlap:

    F(x)[p] = sum_i W_i[p] f(x[tile i])[p] / sum_i W_i[p]

A solver step is affine in the prediction, with the same coefficients in all tiles, so averaging the predictions equals
averaging the tiles after the step. The weights W decrease linearly from the middle of a tile to its edges, which hides
the edges; guidance and thresholding are applied to the full picture.

Source: Bar-Tal et al. 2023 (MultiDiffusion), arXiv:2302.08113, Eq. 5.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.base import ConditionalNetwork
from dit.patchify import grid_positions


def tile_starts(side: int, tile: int, overlap: int) -> list[int]:
    """Return the starts of the fewest, evenly spaced tiles along a side with at least `overlap` between neighbours."""
    if not 0 <= overlap < tile:
        raise ConfigError(f"tiles of {tile} cannot overlap by {overlap}; use 0 to {tile - 1}")
    if side <= tile:
        return [0]
    count = -(-(side - overlap) // (tile - overlap))
    return [round(i * (side - tile) / (count - 1)) for i in range(count)]


def tile_weights(height: int, width: int) -> Tensor:
    """Return the weights of a tile's positions in the average, `[h, w]`: 1 at the edges, growing to the middle."""
    sides = [torch.arange(n, dtype=torch.float32) for n in (height, width)]
    rows, columns = (torch.minimum(i + 1, len(i) - i) for i in sides)
    return rows[:, None] * columns


class TiledNetwork:
    """Calls a network on tiles of samples of one shape; calls it directly if one tile covers the sample.

    Args:
        tile, overlap: (height, width) in patches; a tile has all frames of a clip.
        tokens_at_once: tokens of the tiles in one call; a call has at least one tile of each sample.
    """

    def __init__(
        self, network: ConditionalNetwork, tile: tuple[int, int], overlap: tuple[int, int], tokens_at_once: int
    ) -> None:
        self.network, self.tile, self.overlap, self.tokens_at_once = network, tile, overlap, tokens_at_once
        self._cut: Optional[tuple[PackedBatch, list[tuple[PackedBatch, list[Tensor]]]]] = None

    def __call__(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        """Return the averaged prediction, float32 `[T, C]`; zeros at padding."""
        t, h, w = batch.grids[0]
        size = min(self.tile[0], h), min(self.tile[1], w)
        if size == (h, w):
            return self.network(inputs_TC, time_S, batch)
        if self._cut is None or self._cut[0] is not batch:
            self._cut = batch, self._tiles(batch, size)
        weights_N1 = tile_weights(*size).flatten().repeat(t)[:, None].to(inputs_TC.device)
        weights_R1 = weights_N1.repeat(batch.layout.num_samples, 1)
        total_TC: Optional[Tensor] = None
        total_T1 = inputs_TC.new_zeros(len(inputs_TC), 1, dtype=torch.float32)
        for tiles, places in self._cut[1]:
            outputs_TC = self.network(inputs_TC[torch.cat(places)], torch.cat([time_S] * len(places)), tiles).float()
            if total_TC is None:
                total_TC = outputs_TC.new_zeros(len(inputs_TC), outputs_TC.shape[1])
            for rows_R, prediction_RC in zip(places, outputs_TC.chunk(len(places)), strict=True):
                # The rows of one place are distinct, so this sum does not depend on the order of additions.
                total_TC[rows_R] += weights_R1 * prediction_RC
                total_T1[rows_R] += weights_R1
        assert total_TC is not None
        return total_TC / total_T1.clamp(min=1)

    def _tiles(self, batch: PackedBatch, size: tuple[int, int]) -> list[tuple[PackedBatch, list[Tensor]]]:
        """Return packs of tiles, and for each place in a pack the tokens of its tiles, sample by sample."""
        if len(set(batch.grids)) > 1:
            raise ConfigError(f"tiles need samples of one shape, got grids {sorted(set(batch.grids))}")
        if batch.layout.levels is not None:
            raise ConfigError("tiles need samples without clean tokens, such as a first frame; draw without tiles")
        (t, h, w), device = batch.grids[0], batch.layout.device
        corners = [
            (top, left)
            for top in tile_starts(h, self.tile[0], self.overlap[0])
            for left in tile_starts(w, self.tile[1], self.overlap[1])
        ]
        token_THW = torch.arange(t * h * w, device=device).view(t, h, w)
        starts_S1 = torch.tensor(batch.layout.starts, device=device)[:, None]
        places = [
            (starts_S1 + token_THW[:, top : top + size[0], left : left + size[1]].flatten()).flatten()
            for top, left in corners
        ]
        at_once = max(1, self.tokens_at_once // len(places[0]))
        groups = [places[i : i + at_once] for i in range(0, len(places), at_once)]
        return [(_pack_of_tiles(batch, (t, *size), group), group) for group in groups]


def _pack_of_tiles(batch: PackedBatch, grid: tuple[int, int, int], places: Sequence[Tensor]) -> PackedBatch:
    """Return a pack with the tiles of all samples at some places, each with the conditions of its picture."""
    times, samples = len(places), batch.layout.num_samples
    rows_R = torch.cat(list(places))
    tokens = grid[0] * grid[1] * grid[2]
    return replace(
        batch,
        latents_TC=batch.latents_TC[rows_R],
        positions_T3=grid_positions(grid).repeat(times * samples, 1).to(batch.positions_T3.device),
        layout=SequenceLayout.from_lengths([tokens] * times * samples, device=batch.layout.device),
        sample_ids_S=batch.sample_ids_S.repeat(times),
        grids=(grid,) * times * samples,
        keys=batch.keys * times,
        conditions=Conditions({name: _of_tiles(entry, rows_R, times) for name, entry in batch.conditions.items()}),
    )


def _of_tiles(entry: Entry, rows_R: Tensor, times: int) -> Entry:
    """Return a condition for each tile: its own part of a condition per token, else the condition of its picture."""
    repeated = reduce(Entry.followed_by, [entry] * times)
    return replace(repeated, values=entry.values[rows_R]) if entry.axis == "latent" else repeated
