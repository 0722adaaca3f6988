"""Micro-batches with a given shape and arbitrary values."""

import math
from dataclasses import dataclass
from typing import Optional

import torch

from dit.batch import PackedBatch
from dit.conditions import Condition, Value, pack_conditions
from dit.data_api import BatchSpec
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.patchify import Grid, grid_positions


@dataclass(frozen=True)
class PackShape:
    """The shape of a micro-batch.

    Attributes:
        grids: (t, h, w) in patches of each sample.
        text_lengths: text tokens of each sample; empty for a model without text.
        multiple_of: samples are padded to a multiple of this many tokens.
        total_tokens: tokens of the pack including padding; the sum of the padded samples if None.
    """

    grids: tuple[Grid, ...]
    text_lengths: tuple[int, ...] = ()
    multiple_of: int = 1
    total_tokens: Optional[int] = None

    def layout(self) -> SequenceLayout:
        """Return the layout of the samples in the pack."""
        lengths = [math.prod(grid) for grid in self.grids]
        return SequenceLayout.from_lengths(lengths, multiple_of=self.multiple_of, total_tokens=self.total_tokens)


def batch_of(model: ModelConfig, pack: PackShape, of_loss: tuple[Condition, ...] = ()) -> PackedBatch:
    """Return a micro-batch of a shape, with all conditions of a model and of a loss."""
    layout = pack.layout()
    samples, rows = layout.num_samples, layout.total_tokens
    positions = torch.zeros(rows, 3, dtype=torch.int64)
    for start, grid in zip(layout.starts, pack.grids):
        positions[start : start + math.prod(grid)] = grid_positions(grid)
    spec = model.batch_spec().with_conditions(of_loss)
    values_by_name = {
        condition.name: values
        for condition in spec.conditions
        if (values := _values(condition, pack, spec)) is not None
    }
    return PackedBatch(
        latents_TC=torch.zeros(rows, model.token_channels),
        positions_T3=positions,
        layout=layout,
        sample_ids_S=torch.arange(samples),
        grids=pack.grids,
        keys=tuple(map(str, range(samples))),
        conditions=pack_conditions(spec.conditions, values_by_name, layout, spec.patch),
        draws_S=torch.arange(samples),
        draw_keys_S=torch.arange(samples) if model.draws_in_training else None,
    )


def _values(condition: Condition, pack: PackShape, spec: BatchSpec) -> Optional[list[Value]]:
    """Return a value of a condition for each sample; None for a text in a pack without texts, or an optional one."""
    shape = condition.shape or ()
    if condition.may_be_empty:
        return None
    if condition.axis == "text":
        return [torch.zeros(length, *shape) for length in pack.text_lengths] or None
    if condition.is_per_token:
        is_picture = condition.axis == "latent"
        sides = (spec.patch_temporal, spec.patch_spatial, spec.patch_spatial) if is_picture else (1, 1, 1)
        return [torch.zeros(*shape, *(n * side for n, side in zip(grid, sides))) for grid in pack.grids]
    if condition.is_number:
        return [0 if condition.num_classes is not None else 1.0] * len(pack.grids)
    return [torch.zeros(*shape)] * len(pack.grids)
