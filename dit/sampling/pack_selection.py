"""A pack of some samples of another pack."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.layout import SequenceLayout, to_device
from dit.levels import with_levels


def select_samples(batch: PackedBatch, samples: Sequence[int]) -> PackedBatch:
    """Return a pack of some samples of a pack with all tokens, in the order of their indices `samples`."""
    layout, tokens_T = _select(batch.layout, samples)
    samples_S = layout.tensor(samples)
    per_sample = ("sample_ids_S", "loss_weight_S", "draws_S", "draw_keys_S", "grids_S3")
    of_samples = {name: x_S[samples_S] for name in per_sample if (x_S := getattr(batch, name)) is not None}

    def selected(entry: Entry) -> Entry:
        text_layout = None
        rows = tokens_T if entry.axis in ("latent", "token") else samples_S
        if entry.layout is not None:
            text_layout, rows = _select(entry.layout, samples)
        dropped_S = None if entry.dropped_S is None else entry.dropped_S[samples_S]
        return replace(entry, values=entry.values[rows], layout=text_layout, dropped_S=dropped_S)

    return replace(
        batch,
        latents_TC=batch.latents_TC[tokens_T],
        positions_T3=batch.positions_T3[tokens_T],
        layout=layout,
        grids=tuple(batch.grids[i] for i in samples),
        reference_grids=tuple(batch.reference_grids[i] for i in samples) if batch.reference_grids else (),
        keys=tuple(batch.keys[i] for i in samples),
        conditions=Conditions({name: selected(entry) for name, entry in batch.conditions.items()}),
        **of_samples,
    )


def _select(layout: SequenceLayout, samples: Sequence[int]) -> tuple[SequenceLayout, Tensor]:
    """Return the layout of some samples, and the indices of their tokens, padding included."""
    lengths, padded = (tuple(numbers[i] for i in samples) for numbers in (layout.lengths, layout.padded_lengths))
    tokens = [torch.arange(layout.starts[i], layout.starts[i] + layout.padded_lengths[i]) for i in samples]
    selected = SequenceLayout(lengths, padded, sum(padded), layout.device)
    if (levels := layout.levels) is not None:
        parts = list(zip(levels.layout.lengths, levels.numbers))
        segments = [parts[start:end] for start, end in pairwise(accumulate(levels.counts, initial=0))]
        selected = with_levels(selected, [segments[i] for i in samples])
    return selected, to_device(torch.cat(tokens), layout.device)
