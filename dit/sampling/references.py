"""Clean references of samples to generate, such as pictures to edit."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.data_api import BatchSpec
from dit.errors import ConfigError
from dit.layout import CLEAN, SequenceLayout
from dit.levels import reference_positions, with_levels
from dit.patchify import frames_to_patch, patchify


def add_references(batch: PackedBatch, references: Sequence[Sequence[Tensor]], spec: BatchSpec) -> PackedBatch:
    """Return a full pack with clean references `[C, T, H, W]` of any sizes after the tokens of each sample.

    `batch` is a full pack whose samples have one noise level.
    """
    channels = spec.latent_channels
    latents = [x for several in references for x in several]
    if len(references) != len(batch.grids) or any(x.dim() != 4 or x.shape[0] != channels for x in latents):
        shapes = ", ".join(str(list(x.shape)) for x in latents[:3])
        raise ConfigError(
            f"{len(batch.grids)} samples need as many lists of references [{channels}, T, H, W], got "
            f"{len(references)}: {shapes}"
        )
    old = batch.layout
    if old.levels is not None:
        raise ConfigError("samples with a clean first frame take no reference; give one of the two")
    rows, positions, segments, grids = [], [], [], []
    for several, grid, start in zip(references, batch.grids, old.starts, strict=True):
        tokens = math.prod(grid)
        repeated = [x.expand(-1, frames_to_patch(x.shape[1], spec.patch_temporal), -1, -1) for x in several]
        clean = [patchify(x, *spec.patch) for x in repeated]
        grids.append(tuple(clean_grid for _, clean_grid in clean))
        rows += [batch.latents_TC[start : start + tokens], *(clean_TC.to(batch.latents_TC) for clean_TC, _ in clean)]
        positions.append(batch.positions_T3[start : start + tokens])
        positions += [x.to(old.device) for x in reference_positions(grids[-1], grid)]
        num_clean = sum(map(math.prod, grids[-1]))
        segments.append([(tokens, 0), (num_clean, CLEAN)] if several else [])
    lengths = [math.prod(grid) + sum(map(math.prod, several)) for grid, several in zip(batch.grids, grids)]
    layout = SequenceLayout.from_lengths(lengths, multiple_of=spec.multiple_of, device=old.device)
    return replace(
        batch,
        latents_TC=layout.insert_padding(torch.cat(rows)),
        positions_T3=layout.insert_padding(torch.cat(positions)),
        layout=with_levels(layout, segments),
        reference_grids=tuple(grids),
    )
