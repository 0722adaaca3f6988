"""Held-out data for `launch.evaluate`, distributed over the ranks by micro-batch, and the metric `loss` on them."""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from dit.backends.device import local_device
from dit.batch import PackedBatch
from dit.data_api import DataConfig, NoData
from dit.encoders.comparison import compare_encoders
from dit.encoders.online import batch_encoder
from dit.errors import ConfigError
from dit.inference.preview import without_levels
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.sampling.pack_selection import select_samples
from dit.terminal import counted, echo
from energon_data.dataset import EnergonData
from launch import environment
from launch.argument_types import at_least_one
from launch.measurement import Measurement
from launch.sample import TILES, sampling_settings

if TYPE_CHECKING:
    from dit.inference.generator import Generator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of all metrics that read held-out data."""
    parser.add_argument(
        "--samples",
        type=at_least_one,
        metavar="N",
        help="held-out samples to measure on (default: the run's data.validation_samples)",
    )


def held_out_batches(
    args: argparse.Namespace, generator: "Generator", *, to_draw: bool = False
) -> Iterator[PackedBatch]:
    """Return this rank's share of the held-out micro-batches, encoded if the run encodes online.

    Args:
        to_draw: whether samples with the same conditions are drawn, of which all frames are generated.
    """
    config = generator.config
    spec = config.model.batch_spec(micro_batch_size=config.training.micro_batch_size)
    data = data_of(args, config.data)
    data.validate_held_out("or name a data set that has held-out samples (--data DIR)")
    if args.data is not None and environment.rank() == 0:
        trained = generator.autoencoder, generator.text_encoder
        for note in compare_encoders(data, trained, spec.conditions, f"--checkpoint {args.checkpoint}"):
            echo(f"note: {note}", file=sys.stderr)
    if to_draw:
        data = without_levels(data)
    encode = batch_encoder(data.online_encoding(), spec, local_device(), None, {})
    batches = data.build_validation(spec, dp_rank=0, dp_size=1)
    return map(encode, islice(batches, environment.rank(), None, environment.world_size()))


def redrawn(args: argparse.Namespace, generator: "Generator") -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield samples of this rank's held-out micro-batches, and the same number of generated samples.

    A generated sample has the size and the conditions of a held-out one, and noise that depends on its name only.
    """
    settings = sampling_settings(args)
    tiles = {name: settings.pop(name) for name in TILES}
    settings.pop("fps")
    sampling = generator.sampling(**settings)
    for batch in held_out_batches(args, generator, to_draw=True):
        for part in _by_levels(batch.to(local_device()), generator.config.objective):
            real = part.unpatchified(part.latents_TC, *generator.spec.patch)
            yield real, generator.generate_pack(part, sampling, **tiles)


def _by_levels(batch: PackedBatch, objective: Objective) -> list[PackedBatch]:
    """Split a pack into packs of samples with the same noise levels, which may depend on the size of a sample."""
    samples_of: dict[int, list[int]] = {}
    for i, grid in enumerate(batch.grids):
        samples_of.setdefault(math.prod(grid), []).append(i)
    objectives = [objective.at_size(tokens, batch.latents_TC.shape[1]) for tokens in samples_of]
    if all(other == objectives[0] for other in objectives):
        return [batch]
    return [select_samples(batch, samples) for samples in samples_of.values()]


def data_of(args: argparse.Namespace, data: DataConfig) -> DataConfig:
    """Return the data of the run with the changes in the arguments; `--data` names a folder for Energon."""
    changes: dict[str, Any] = {}
    if args.samples is not None:
        changes["validation_samples"] = args.samples
    if args.data is not None:
        changes["path"] = args.data
        if getattr(data, "blend", None) is not None:
            changes |= {"blend": None, "blend_steps": None}
    if args.data is not None and not hasattr(data, "path"):
        return EnergonData(**changes)
    if isinstance(data, NoData):
        raise ConfigError("imported weights have no held-out data; name a data set with --data DIR")
    if unknown := [name for name in changes if not hasattr(data, name)]:
        raise ConfigError(f"{type(data).__name__} has no {', '.join(unknown)}; measure without --samples")
    return replace(data, **changes)


def measure_loss(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Average the loss over the held-out data, as in training and at fixed flow times as MLPerf measures FLUX.1.

    Every rank calls this.
    """
    from dit.training.validate import NUM_TIMES, loss_at_times, loss_sums, mean_losses

    config, device = generator.config, local_device()
    batches = list(held_out_batches(args, generator))
    sums = loss_sums(generator.network, iter(batches), config.objective, config.model, device)
    dist.all_reduce(sums)
    losses = mean_losses(config.objective, sums)
    tokens = int(sums[:, -1].sum())
    lines = [f"held-out loss: {losses['loss']:.6f} ({tokens:,} tokens, noise levels as in training)"]
    levels = [f"{value:.4f}" for name, value in losses.items() if name.startswith("loss_level_")]
    lines.append(f"by quarter of the noise levels, low to high: {' '.join(levels)}")
    record: dict[str, object] = {**losses, "tokens": tokens}
    if isinstance(config.objective, FlowMatching):
        at_times = loss_at_times(generator.network, iter(batches), config.objective, config.model, device)
        dist.all_reduce(at_times)
        by_time = {f"{i}/{NUM_TIMES}": float(s / n) for i, (s, n) in enumerate(at_times.tolist()) if n}
        samples, mean = int(at_times[:, 1].sum()), sum(by_time.values()) / len(by_time)
        lines.append(
            f"at {NUM_TIMES} equally spaced flow times, as MLPerf's FLUX.1: {mean:.6f} ({counted(samples, 'sample')})"
        )
        lines.append("by time: " + ", ".join(f"{time} {value:.4f}" for time, value in by_time.items()))
        record |= {"loss_at_times": mean, "by_time": by_time, "samples": samples}
    return Measurement(lines, record)
