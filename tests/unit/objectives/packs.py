"""Packs of Gaussian latents, their noise, and recipes with overrides, for tests of objectives."""

import torch

from dit.batch import PackedBatch
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.run_config import RunConfig
from launch.config_file import built
from launch.overrides import apply_overrides
from launch.train import call_recipe
from tests.support.batches import pack_of


def pack(lengths: list[int], channels: int = 4, *, std: float = 1.0, multiple_of: int = 1) -> PackedBatch:
    """Make Gaussian latents with a given deviation; the length of a sample is also its id."""
    layout = SequenceLayout.from_lengths(lengths, multiple_of=multiple_of)
    generator = torch.Generator().manual_seed(0)
    rows = {n: std * torch.randn(n, channels, generator=generator) for n in sorted(set(lengths))}
    latents = torch.zeros(layout.total_tokens, channels)
    for start, n in zip(layout.starts, lengths):
        latents[start : start + n] = rows[n]
    return pack_of(layout, latents, sample_ids_S=torch.tensor(lengths), keys=tuple(map(str, lengths)))


def noise_for(batch: PackedBatch, step: int = 0) -> AddressedNoise:
    return AddressedNoise(1234, step, batch.sample_ids_S, batch.layout)


def run_config(recipe: str, *overrides: str) -> RunConfig:
    task = call_recipe(recipe)
    apply_overrides(task, list(overrides))
    return built(task)
