"""Time the optimizer steps of a recipe: `python -m benchmarks.step --factory NAME [key=value ...]`, on CPU or GPU.

The steps are those of training, through the same code. Under torchrun every rank takes part and rank 0 reports: one
line of JSON on the last line of the output (and appended to `--out`), and a table before it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Optional

from benchmarks.rows import append
from dit.errors import EXIT_OK, EXIT_UNEXPECTED, ConfigError, one_line_errors
from dit.terminal import echo
from launch import cli, environment
from launch.train import resolve

if TYPE_CHECKING:
    from dit.batch import PackedBatch
    from dit.models.base import ModelConfig
    from dit.parallel.dims import ParallelConfig
    from dit.run_config import RunConfig
    from dit.settings import TrainingConfig
    from dit.step.device_batches import DeviceBatches

OK, OUT_OF_MEMORY, REFUSED = "ok", "out of memory", "refused"
"""How a measurement ended, in its record."""
WRITING_S = 30.0
"""Longest time that other ranks wait until rank 0 has written why the settings are refused."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; overrides are parsed by the recipe."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--factory", required=True, help="recipe (python -m launch.train --list)")
    parser.add_argument("--steps", type=int, default=20, help="timed optimizer steps (%(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="optimizer steps before timing (%(default)s)")
    parser.add_argument(
        "--shape",
        metavar="TxHxW",
        help="synthetic latents (default: the recipe's own if it is synthetic, or 256 tokens)",
    )
    parser.add_argument("--real-data", action="store_true", help="the recipe's own data instead of synthetic latents")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


class Recording(Iterator["PackedBatch"]):
    """Yields micro-batches and records their shapes.

    Args:
        batches: the `DeviceBatches` of a run.
    """

    def __init__(self, batches: "DeviceBatches") -> None:
        self.batches = batches
        self.shapes: list[tuple[Any, Any, Any]] = []

    def __next__(self) -> "PackedBatch":
        from dit.monitoring.flops import shape_of

        batch = next(self.batches)
        self.shapes.append(shape_of(batch))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


def config_of(args: argparse.Namespace, run_dir: str) -> "RunConfig":
    """Build a recipe's settings with real data replaced by synthetic latents, except with `--real-data`."""
    from energon_data.mock import MockData
    from launch import config_file

    cli.check_factory(args.factory)
    task = resolve(cli.Options(factory=args.factory, overrides=list(args.overrides)))
    task.training.run_dir = run_dir
    task.logging.tensorboard = task.logging.wandb = False
    config = config_file.built(task)
    synthetic = isinstance(config.data, MockData) and args.shape is None
    if not args.real_data and not synthetic:
        model = config.model
        side = 16 * model.patch_spatial
        # Few enough samples for the cache: generating them is not timed.
        shape = args.shape or f"{model.patch_temporal}x{side}x{side}"
        return replace(config, data=MockData(shapes=[shape], dataset_size=64))
    return config


def recomputed_share(training: "TrainingConfig", parallel: "ParallelConfig", model: "ModelConfig") -> float:
    """Return the share of the units (layers, or blocks of a UNet) that run once more in the backward pass."""
    from dit.parallel.build import build_on_meta
    from dit.parallel.pipeline import split_layers

    if training.recompute != "full":
        return 0.0
    if training.recompute_layers is None:
        return 1.0
    num_layers, units = model.megatron_sizes().num_layers, len(list(build_on_meta(model).units()))
    chunks = split_layers(
        num_layers,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.pipeline_layers,
    )
    chunks[-1] += units - num_layers  # a UNet is one layer, and a wide head has layers of its own
    return sum(min(training.recompute_layers, count) for count in chunks) / units


def measure(config: "RunConfig", steps: int, warmup: int) -> dict[str, Any]:
    """Run `warmup + steps` optimizer steps and return one record; rank 0's clock counts."""
    import torch
    import torch.distributed as dist

    from dit.backends import process_groups
    from dit.backends.device import describe, peak_flops, peak_memory, synchronize
    from dit.monitoring.flops import Convention, PackFlops
    from dit.parallel.build import count_parameters
    from dit.parallel.implementations import implementations
    from dit.training.pretrain import Run
    from dit.training.rates import mean_terms
    from dit.training.validate import named_losses

    dims, spec = config.check_here()
    groups = process_groups.initialize(config.parallel)
    run = Run(config, dims, spec, groups, quiet=True)
    batches = run.batches = Recording(run.batches)  # type: ignore[assignment]
    model, training, parallel = config.model, config.training, config.parallel
    losses = torch.zeros(len(config.objective.logged) + 1, device=run.device)
    seconds = []
    for i in range(warmup + steps):
        if i == warmup:
            batches.reset()
            batches.shapes.clear()
            losses.zero_()
        synchronize()
        started = time.perf_counter()
        run.step(losses)
        synchronize()
        seconds.append(time.perf_counter() - started)
    counted = batches.reset()
    conventions: tuple[Convention, ...] = ("model", "hardware", "nemo")
    again = recomputed_share(training, parallel, model)
    counts = PackFlops(model, config.objective.auxiliary)
    flops = [
        sum(counts.training(*shape, convention=c, recomputed=again) for shape in batches.shapes) for c in conventions
    ]
    totals = torch.tensor([counted.samples, counted.valid_tokens, counted.padded_tokens, *flops], dtype=torch.float64)
    totals = totals.to(run.device)
    dist.all_reduce(totals, group=groups.dp)
    samples, valid, padded, *flops_per_step = (totals / steps).tolist()
    peak = peak_flops(describe())
    p50, p90 = percentile(seconds[warmup:], 50), percentile(seconds[warmup:], 90)
    ranks = groups.world_size
    tflops = {c: count / ranks / p50 / 1e12 for c, count in zip(conventions, flops_per_step)}
    run.close()
    record = {
        "world_size": ranks,
        "tp": parallel.tensor_model_parallel_size,
        "sp": parallel.sequence_parallel,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "dp": dims.data_parallel_size,
        "data_parallel": parallel.data_parallel,
        "precision": training.precision,
        "recompute": training.recompute,
        "attention": implementations(model, training)["attention"].name,
        "parameters": count_parameters(model),
        "micro_batch_size": dims.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "tokens_per_step": valid,
        "steps": steps,
        "step_ms_p50": 1e3 * p50,
        "step_ms_p90": 1e3 * p90,
        "samples_per_s": samples / p50,
        "valid_tokens_per_s_per_rank": valid / p50 / ranks,
        "padded_tokens_per_s_per_rank": padded / p50 / ranks,
        **{f"tflops_per_rank_{c}": value for c, value in tflops.items()},
        "mfu": None if peak is None else 1e12 * tflops["model"] / peak,
        "peak_memory_gib": next(iter(peak_memory().values())) / 2**30,
        "loss": named_losses(config.objective, mean_terms(losses, groups))["loss"],
    }
    process_groups.destroy()
    return record


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, interpolated between the values."""
    return values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]


def revision() -> str:
    """Return the git revision of the code, marked when the tree differs from it."""
    from dit.monitoring.environment_record import git_revision

    record = git_revision()
    return "unknown" if record is None else record["commit"][:12] + ("-dirty" if record["dirty"] else "")


def table(record: dict[str, Any]) -> str:
    """Format a record, one quantity per line."""
    width = max(map(len, record))
    values = {k: f"{v:,.4g}" if isinstance(v, float) else v for k, v in record.items()}
    return "\n".join(f"{name:<{width}}  {value}" for name, value in values.items())


def where() -> dict[str, Any]:
    """Return the device, the revision of the code and the versions, for the record of a measurement."""
    from dit.backends.device import describe
    from dit.monitoring.environment_record import versions

    record = versions()
    return {"device": describe(), "revision": revision(), "torch": record["packages"]["torch"], "versions": record}


def write(record: dict[str, Any], out: Optional[Path]) -> None:
    """Print a record on rank 0, and append its line to a file."""
    if int(os.environ.get("RANK", "0")):
        return
    echo(table(record))
    echo(json.dumps(record))
    append(out, record)


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code; out of memory and a refused layout are results, with a line each."""
    args = build_parser().parse_intermixed_args(argv)
    if args.steps < 1 or args.warmup < 0:
        raise ConfigError(f"--steps={args.steps} must be at least 1 and --warmup={args.warmup} at least 0")
    environment.prepare()
    record: dict[str, Any] = {"recipe": args.factory, "overrides": args.overrides, "status": OK, **where()}
    with tempfile.TemporaryDirectory() as run_dir:
        try:
            record |= measure(config_of(args, run_dir), args.steps, args.warmup)
        except ConfigError as error:
            write(record | {"status": REFUSED, "error": str(error).partition("\n")[0]}, args.out)
            if os.environ.get("RANK", "0") != "0":
                time.sleep(WRITING_S)  # torchrun stops rank 0, which writes the record, when another rank ends
            raise
        except RuntimeError as error:
            if OUT_OF_MEMORY not in str(error).lower():
                raise
            record["status"] = OUT_OF_MEMORY
    write(record, args.out)
    return EXIT_OK if record["status"] == OK else EXIT_UNEXPECTED


if __name__ == "__main__":
    sys.exit(main())
