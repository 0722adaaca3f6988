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


def add_references(batch: PackedBatch, references: Sequence[Tensor], spec: BatchSpec) -> PackedBatch:
    """Return a pack of samples to generate with a clean reference after the tokens of each sample.

    Args:
        batch: a full pack whose samples have one noise level.
        references: latent `[C, T, H, W]` of each sample, of any size.
    """
    channels = spec.latent_channels
    if len(references) != len(batch.grids) or any(x.dim() != 4 or x.shape[0] != channels for x in references):
        shapes = ", ".join(str(list(x.shape)) for x in references[:3])
        raise ConfigError(
            f"{len(batch.grids)} samples need as many references [{channels}, T, H, W], got {len(references)}: {shapes}"
        )
    old = batch.layout
    if old.levels is not None:
        raise ConfigError("samples with a clean first frame take no reference; give one of the two")
    latents, positions, segments, grids = [], [], [], []
    for reference, grid, start in zip(references, batch.grids, old.starts, strict=True):
        tokens = math.prod(grid)
        repeated = reference.expand(-1, frames_to_patch(reference.shape[1], spec.patch_temporal), -1, -1)
        clean_TC, clean_grid = patchify(repeated, *spec.patch)
        latents += [batch.latents_TC[start : start + tokens], clean_TC.to(batch.latents_TC)]
        positions += [batch.positions_T3[start : start + tokens], reference_positions(clean_grid, grid).to(old.device)]
        segments.append([(tokens, 0), (len(clean_TC), CLEAN)])
        grids.append(clean_grid)
    lengths = [sum(tokens for tokens, _ in parts) for parts in segments]
    layout = SequenceLayout.from_lengths(lengths, multiple_of=spec.multiple_of, device=old.device)
    return replace(
        batch,
        latents_TC=layout.insert_padding(torch.cat(latents)),
        positions_T3=layout.insert_padding(torch.cat(positions)),
        layout=with_levels(layout, segments),
        reference_grids=tuple(grids),
    )
