"""The metric `loss`: the held-out loss as in training, and at fixed flow times as MLPerf measures FLUX.1."""

import argparse
from typing import TYPE_CHECKING

from launch.held_out import held_out_batches
from launch.measurement import Measurement

if TYPE_CHECKING:
    from dit.inference.generator import Generator


def measure(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Average the loss over the held-out data; every rank calls this."""
    import torch.distributed as dist

    from dit.backends.device import local_device
    from dit.objectives.flow_matching import FlowMatching
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
        lines.append(f"at {NUM_TIMES} equally spaced flow times, as MLPerf's FLUX.1: {mean:.6f} ({samples:,} samples)")
        lines.append("by time: " + ", ".join(f"{time} {value:.4f}" for time, value in by_time.items()))
        record |= {"loss_at_times": mean, "by_time": by_time, "samples": samples}
    return Measurement(lines, record)
