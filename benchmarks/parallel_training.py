"""Tiny models and packs for tests and `benchmarks.parallel_matrix`, which compare layouts by `dit.verify`.

A case is a dictionary: `parallel`, `packed`, `model` (settings of `tiny_model`), and the other keys of `trial_of`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.registry import config_class
from dit.parallel.dims import ParallelConfig
from dit.patchify import grid_positions
from dit.verify import ranks, trial
from dit.verify.trial import OPTIMIZER, TRAINING, Built, Trial

ONE_TOKEN = (1, 1, 1)
GRIDS = [(1, 4, 4), (2, 2, 4), (1, 2, 2), (1, 4, 4), (1, 2, 4), (3, 2, 2), (1, 4, 4), (1, 2, 2)]


def tiny_model(backbone: str = "dit", **changes: Any) -> ModelConfig:
    """Return a backbone of 2 or 4 layers of width 32, with some settings changed."""
    if backbone != "dit":
        sizes = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "in_channels": 4, "context_size": 12}
        config = config_class(backbone)
        known = {field.name for field in fields(config)}
        sizes = {name: size for name, size in sizes.items() if name in known}
        return config(**{**sizes, "context_dropout": 0.4, **changes})
    sizes = {"hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "in_channels": 4, "num_classes": 5}
    options = {"qk_layernorm": True, "position_embedding": "sincos_3d", "context_size": 12, "context_dropout": 0.4}
    return DiTConfig(**{**sizes, **options, **changes})


def micro_batch(
    index: int,
    *,
    packed: bool,
    multiple_of: int,
    grids: tuple[tuple[int, int, int], ...] = (),
    total_tokens: int = 40,
) -> PackedBatch:
    """Return two different samples: a ragged pack with padding if packed, else a dense batch."""
    generator = torch.Generator().manual_seed(100 + index)
    grids = grids or tuple(GRIDS[(2 * index + i) % len(GRIDS)] if packed else (1, 4, 4) for i in range(2))
    lengths = [t * h * w for t, h, w in grids]
    layout = SequenceLayout.from_lengths(
        lengths, multiple_of=multiple_of if packed else 1, total_tokens=total_tokens if packed else 32
    )
    latents, positions = torch.zeros(layout.total_tokens, 16), torch.zeros(layout.total_tokens, 3, dtype=torch.int64)
    for start, grid, length in zip(layout.starts, grids, lengths):
        latents[start : start + length] = torch.randn(length, 16, generator=generator)
        positions[start : start + length] = grid_positions(grid)
    context_layout = SequenceLayout.from_lengths([3 + index % 3, 5])
    label, context = [index % 5, (index + 2) % 5], torch.randn(context_layout.total_tokens, 12, generator=generator)
    pooled, first = (torch.randn(size, generator=generator) for size in ((2, 6), (layout.valid_tokens, 20)))
    others = {}
    # Texts and pictures that some samples do not have.
    for name, width, counts in (("context_2", 10, (index % 3, 2)), ("image_tokens", 6, (3, 4 * (index % 2)))):
        texts = SequenceLayout.from_lengths(counts, may_be_empty=True)
        others[name] = Entry("text", torch.randn(sum(counts), width, generator=generator), texts)
    control = layout.insert_padding(torch.randn(layout.valid_tokens, 12, generator=generator))
    return PackedBatch(
        latents_TC=latents,
        positions_T3=positions,
        layout=layout,
        sample_ids_S=torch.tensor([1000 + 2 * index, 1001 + 2 * index]),
        grids=grids,
        keys=(f"{index}a", f"{index}b"),
        conditions=Conditions(
            others,
            label=Entry("sample", torch.tensor(label)),
            context=Entry("text", context, context_layout),
            pooled=Entry("sample", pooled),
            fps=Entry("sample", torch.tensor([24.0, 8.0 + index])),
            first_frames=Entry("latent", layout.insert_padding(first)),
            control=Entry("latent", control),
        ),
    )


def packs(case: dict[str, Any], dp_rank: int, dp_size: int, token_multiple: int) -> Iterator[PackedBatch]:
    """Yield the packs of one data-parallel rank, endlessly."""
    num_micro, one_token = case.get("micro_batches", 4), case.get("one_token_packs", 0)
    for i in itertools.count(dp_rank, dp_size):
        # Under context parallelism all ranks but the first then have only padding.
        grids = (ONE_TOKEN,) * 2 if i % num_micro >= num_micro - one_token else ()
        yield micro_batch(i, packed=case["packed"], multiple_of=max(4, token_multiple), grids=grids)


def trial_of(case: dict[str, Any]) -> Trial:
    """Return the trial that a case describes."""
    stated = {name: case[name] for name in ("steps", "objective") if name in case}
    training = {"precision": case["precision"]} if "precision" in case else {}
    batch = case.get("micro_batches", TRAINING.global_batch_size)
    return Trial(
        model=tiny_model(**case.get("model", {})),
        parallel=ParallelConfig(**case["parallel"]),
        stream=partial(packs, case),
        training=replace(TRAINING, global_batch_size=batch, **training, **case.get("recompute", {})),
        optimizer=replace(OPTIMIZER, **case.get("optimizer", {})),
        alter=case.get("break"),
        **stated,
    )


def build(case: dict[str, Any]) -> Built:
    """Build groups, model chunks and optimizer of a case on this rank."""
    return trial.build(trial_of(case))


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train a case's steps; return losses, gradient norms, global gradients and parameters, and copies that differ."""
    return trial.train(trial_of(case), case.get("then"))


def run_world(
    world_size: int, cases: list[dict[str, Any]], folder: Path, *, timeout_s: float = 900.0
) -> list[dict[str, Any]]:
    """Run cases in one start of ranks, as `dit.verify.ranks.run_world` does; a case without a task is a training."""
    training = f"{__name__}:{train.__name__}"
    return ranks.run_world(world_size, [{"task": training, **case} for case in cases], folder, timeout_s=timeout_s)
